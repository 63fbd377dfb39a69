"""Checks the losses that a job gives for a turn, and divides each by the valid units of the whole window."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from memfit.apply.train_state import TrainState
from memfit.engine.capabilities import CAPABILITIES
from memfit.engine.collectives import NOTHING, Units
from memfit.errors import InputError, describe, message_of
from memfit.job import Turn
from memfit.printable import shortened


class MicroBatch(NamedTuple):
    """One micro-batch of a window: how to fetch it to the device, and its padded units."""

    fetch: Callable[[], Any]
    """Returns the batch on the device. It may seed the generators for the forward that follows."""
    padded_units: int
    ids: tuple[int, ...] = ()
    """The ids of its samples in the data set; empty for a synthetic batch."""
    units: Mapping[str, int] | int | None = None
    """Valid units by loss, if they are known before the forward."""
    counts: bool = True
    """False if it runs only so that this rank joins the collectives of the others; its gradients are zero."""


@dataclass(kw_only=True)
class WindowUnits:
    """The units of a window's micro-batches, of one rank or of all ranks, as known before their forwards."""

    units: tuple[Mapping[str, int] | int | None, ...]
    """The valid units of each micro-batch."""
    padded: int
    parts: int = 1
    """Ranks that each compute the losses of a part of every micro-batch."""

    @staticmethod
    def by(micro_batches: Sequence[MicroBatch]) -> WindowUnits:
        """Returns the units of these micro-batches."""
        counted = [micro for micro in micro_batches if micro.counts]
        return WindowUnits(units=tuple([m.units for m in counted]), padded=sum([m.padded_units for m in counted]))

    @staticmethod
    def by_all(shares: Sequence[WindowUnits], parts: int) -> WindowUnits:
        """Returns the units of all shares of a window together."""
        return WindowUnits(
            units=tuple(u for share in shares for u in share.units),
            padded=sum(share.padded for share in shares),
            parts=parts,
        )

    @property
    def count(self) -> int:
        """The number of losses that are added up: micro-batches, by the ranks that each compute a part of them."""
        return len(self.units) * self.parts


@contextmanager
def _without_cast_weights() -> Iterator[None]:
    """Context in which autocast keeps no copy of a weight in its type, for an engine that shards weights.

    It would keep those of all modules to the forward's end, though each module's own weights are dropped after it.
    """
    before = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(before)


_NUMBERS = (int, float)
_HALVES = (torch.bfloat16, torch.float16)
MOST_UNITS = 1 << 62
"""No window has as many, and a tensor cannot be divided by a larger whole number."""


def losses_of(
    train_state: TrainState, turn: Turn, batch: Any, shared: dict[str, Any], *, may_be_empty: bool = False
) -> dict[str, tuple[Tensor, Units]]:
    """Returns the turn's losses by name, checked. A synthetic batch must not be empty: all of its units are valid."""
    with _without_cast_weights() if CAPABILITIES[train_state.engine.name].shards_weights else NOTHING:
        if train_state.job.autocasts_itself or train_state.job.precision == "fp32":
            given = turn.loss(train_state.nets, batch, shared)
        else:
            with train_state.job.autocast(train_state.device):
                given = turn.loss(train_state.nets, batch, shared)
    named = {turn.name: given} if isinstance(given, tuple) or not isinstance(given, Mapping) else dict(given)
    write = "write loss(self, nets, batch) -> (sum over the valid units, number of valid units)"
    if not named:
        raise InputError(f"turn {turn.name!r}", "gave no loss", write)
    losses: dict[str, tuple[Tensor, Units]] = {}
    for name, pair in named.items():
        if not isinstance(name, str):
            raise InputError(f"loss {name!r}", f"its name is a {_kind(name)}, not text", "write {'name': (sum, units)}")
        if not isinstance(pair, tuple) or len(pair) != 2:
            raise InputError(f"loss {name!r}", f"gave {_kind(pair)}, not (sum, units)", write)
        value, count = pair
        if not isinstance(value, Tensor):
            raise InputError(f"loss {name!r}", f"its sum is a {_kind(value)}, not a tensor", write)
        if value.dim() != 0:
            raise InputError(f"loss {name!r}", f"a tensor of shape {tuple(value.shape)}, not a scalar", write)
        if value.is_complex():
            raise InputError(
                f"loss {name!r}", f"a complex number ({value.dtype}), not a real one", "take .abs() or .real"
            )
        if not value.requires_grad:
            raise InputError(
                f"loss {name!r}",
                "it does not depend on any trained parameter",
                "compute it from the trained nets' outputs",
            )
        if isinstance(count, Tensor):
            if count.dim() != 0:
                raise InputError(
                    f"loss {name!r}", f"its units are a tensor of shape {tuple(count.shape)}, not one number", write
                )
        elif not (isinstance(count, _NUMBERS) and (0 < count < MOST_UNITS or (may_be_empty and count == 0))):
            raise InputError(
                f"loss {name!r}",
                f"{shortened(repr(count), 40)} valid units",
                "give the number of samples, frames or tokens in the sum, 1 or more",
            )
        losses[name] = (value, count)
    return losses


def _kind(value: Any) -> str:
    return "tensor" if isinstance(value, Tensor) else type(value).__name__


def host_units(units: Any) -> Any:
    """Returns what ``Job.units`` gave, with numbers for 0-d tensors (``(labels != -100).sum()``)."""
    if isinstance(units, Mapping):
        return {name: host_units(count) for name, count in units.items()}
    return units.item() if isinstance(units, Tensor) and units.dim() == 0 else units


def known_units(window_units: WindowUnits, names: Iterable[str]) -> dict[str, int] | None:
    """Returns the window's valid units by loss, or None if a micro-batch did not give its units before the forward."""
    known: dict[str, int] = {}
    for units in window_units.units:
        if units is None:
            return None
        if not isinstance(units, (*_NUMBERS, Mapping)):
            write = "write units(self, batch) -> a whole number, or {'name': valid units}"
            raise InputError("units(batch)", f"gave {_kind(units)}, not how many units are valid", write)
        for name in names:
            try:
                count = units[name] if isinstance(units, Mapping) else units
            except KeyError:
                raise InputError(
                    f"loss {name!r}", "units(batch) does not name it", f"give {{{name!r}: valid units}} too"
                ) from None
            if not (isinstance(count, _NUMBERS) and 0 <= count < MOST_UNITS):
                why = f"units(batch) gave {shortened(repr(count), 40)} valid units"
                raise InputError(f"loss {name!r}", why, "give a whole number, 0 or more")
            known[name] = known.get(name, 0) + count
    return known


def normalised(
    losses: dict[str, tuple[Tensor, Units]], known: Mapping[str, int] | None, window_units: WindowUnits
) -> Tensor:
    """Returns the sum of the losses, each divided by the window's valid units (by the padded units if the valid ones
    are not known yet).

    A loss without any valid unit adds nothing.
    """
    total: Tensor | None = None
    for name, (value, count) in losses.items():
        if known:
            units: Units = known[name] or 1
        elif window_units.count > 1:
            units = window_units.padded
        elif isinstance(count, Tensor) and len(losses) > 1:
            units = torch.where(count == 0, torch.ones_like(count), count)
        else:
            units = count if isinstance(count, Tensor) else count or 1
        part = value / units
        total = part if total is None else total + part
    assert total is not None
    return total


def nothing(losses: Mapping[str, tuple[Tensor, Units]]) -> Tensor:
    """Returns a loss on the same graph whose gradients are zero."""
    return torch.stack([value for value, _ in losses.values()]).sum() * 0.0


def summed(
    turn: Turn,
    micro: MicroBatch,
    losses: dict[str, tuple[Tensor, Units]],
    window_units: WindowUnits,
    sums: dict[str, Tensor],
    units: dict[str, Units],
) -> Tensor:
    """Returns what a micro-batch's backward runs on, and adds its losses and units to the window's.

    Raises:
        InputError: several losses give their units too late, or others than a micro-batch before.
    """
    known = known_units(window_units, losses)
    if not known and len(losses) > 1 and window_units.count > 1:
        names = ", ".join(losses)
        raise InputError(
            f"losses {names}",
            "several losses in several micro-batches need their units before the forward",
            "write units(self, batch) -> {'name': valid units}",
        )
    loss = normalised(losses, known, window_units) if micro.counts else nothing(losses)
    if units and losses.keys() != units.keys():
        why = f"it gave {', '.join(losses)} for a micro-batch, and {', '.join(units)} for one before"
        raise InputError(f"turn {turn.name!r}", why, "give the same losses for every micro-batch")
    if micro.counts:
        for name, (value, count) in losses.items():
            detached = value.detach()
            if detached.dtype in _HALVES:  # a sum in 8 or 11 bits would lose the later terms
                detached = detached.float()
            sums[name] = sums[name] + detached if name in sums else detached
            units[name] = units[name] + count if name in units else count
    return loss


_BACKWARD_MISTAKES = (
    "modified by an inplace operation",
    "is not implemented",
    "backward through the graph a second time",
)
"""Messages of autograd's C++ engine about a forward that cannot be differentiated."""


class BackwardMistakes:
    """Around a backward: raises InputError where the forward cannot be differentiated."""

    def __init__(self, turn: Turn) -> None:
        self._turn = turn

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if isinstance(error, RuntimeError) and any(words in message_of(error) for words in _BACKWARD_MISTAKES):
            raise InputError(
                f"turn {self._turn.name!r}",
                f"its loss has no backward: {describe(error)}",
                "mend the forward of the job's nets or its loss",
            ) from error
