"""A window: what one optimizer step learns from. Its losses are normalised by the window's own valid units.

    N = sum over micro-batches (and ranks) of valid units;  L = sum over units of the loss / N

With one micro-batch, N is its own count. With several, N is either known before the first backward (``Job.units``) or
comes from the losses: then the backwards run on ``sum / P`` with P the padded units, and the gradients are multiplied
by P / N before they are clipped, which is the same to rounding.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from memfit.apply.rig import Rig, update_ema
from memfit.engine.ranks import Units, gather, together, total
from memfit.errors import InputError, describe
from memfit.job import Turn

Mark = Callable[[str], None]
"""Told which part of the window begins: fetch, forward, backward, clip, optimizer, zero_grad, ema."""


@dataclass(frozen=True, kw_only=True)
class MicroBatch:
    """One micro-batch of a window: how to fetch it onto the device, and its padded units."""

    fetch: Callable[[], Any]
    padded_units: int
    units: Mapping[str, int] | int | None = None
    """Valid units, by loss, where they are known before the forward."""
    counts: bool = True
    """False: it is run only so that this rank joins the collectives of the others; its gradients are zero."""


@dataclass(frozen=True, kw_only=True)
class WindowResult:
    """What a window gave: each loss per valid unit, its units, and each turn's gradient norm (None: not clipped)."""

    losses: dict[str, Tensor]
    units: dict[str, Units]
    norms: dict[str, Tensor | None]
    skipped: tuple[str, ...]
    """Turns that took no step because the window held no valid unit."""


def _ignore(part: str) -> None:
    pass


def run_window(
    rig: Rig, micro_batches: Sequence[MicroBatch], mark: Mark = _ignore, *, step: bool = True
) -> WindowResult:
    """Forward and backward of every micro-batch, clip and step, turn by turn, with all ranks of the rig's engine.

    Args:
        micro_batches: this rank's part of the window.
        step: False leaves the weights as they are: gradients are made and freed.

    Raises:
        InputError: a loss that is not a scalar tensor, has no units, or several losses whose units come too late.
        RanksOutOfMemoryError: memory ran out on a rank, and there are several: every one raises it.
    """
    engine, turns = rig.engine, _turns(rig)
    own = Told.of(micro_batches)
    everyone = own if engine.world == 1 else Told.together(gather(engine, own))
    work = _Work(rig=rig, micro_batches=micro_batches, mark=mark, alone=len(turns) == 1)
    sums: dict[str, Tensor] = {}
    units: dict[str, Units] = {}
    norms: dict[str, Tensor | None] = {}
    skipped: list[str] = []
    for number, turn in enumerate(turns):
        told = everyone if rig.shares(turn.optimizers) else own
        with together(engine):
            made, found = work.turn(turn, number, told)
            if number == len(turns) - 1:
                work.forget()
        everywhere_made, everywhere = total(engine, made, found) if engine.world > 1 else (made, found)
        if rig.shares(turn.optimizers):
            found = everywhere
        if any(bool(count == 0) for count in found.values()):
            skipped.append(turn.name)
        elif step:
            mark("clip")
            parameters = rig.parameters_of(turn.optimizers)
            if engine.world > 1 and rig.shares(turn.optimizers):
                with together(engine):
                    prepared = engine.prepare(parameters)
                engine.reduce(prepared)
                del prepared
            with together(engine):
                norms[turn.name] = _finish_gradients(rig, turn, found, told)
                mark("optimizer")
                _step(rig, turn)
        if rig.job.zero_grad == "after_step" or not step:
            mark("zero_grad")
            for optimizer in rig.optimizers.values():
                optimizer.zero_grad(set_to_none=True)
        sums.update(everywhere_made)
        units.update(everywhere)
    if rig.scaler and step:
        rig.scaler.update()
    for schedule in rig.schedules.values() if step else ():
        schedule.step()
    if step:
        engine.share_buffers(rig.nets)
    if rig.ema and step:
        mark("ema")
        update_ema(rig)
    return WindowResult(
        losses={name: value / units[name] for name, value in sums.items()},
        units=units,
        norms=norms,
        skipped=tuple(skipped),
    )


@dataclass(frozen=True, kw_only=True)
class Told:
    """What micro-batches tell before their forward."""

    units: tuple[Mapping[str, int] | int | None, ...]
    padded: int

    @staticmethod
    def of(micro_batches: Sequence[MicroBatch]) -> Told:
        """Of one rank's."""
        counted = [micro for micro in micro_batches if micro.counts]
        return Told(units=tuple(m.units for m in counted), padded=sum(m.padded_units for m in counted))

    @staticmethod
    def together(ranks: Sequence[Told]) -> Told:
        """Of every rank's."""
        return Told(units=tuple(u for rank in ranks for u in rank.units), padded=sum(rank.padded for rank in ranks))

    def known(self, names: Iterable[str]) -> dict[str, int] | None:
        """The units by loss, where every micro-batch told its own."""
        known: dict[str, int] = {}
        for units in self.units:
            if units is None:
                return None
            for name in names:
                try:
                    known[name] = known.get(name, 0) + (units if isinstance(units, int) else units[name])
                except KeyError:
                    raise InputError(
                        f"loss {name!r}", "units(batch) does not name it", f"give {{{name!r}: valid units}} too"
                    ) from None
        return known


@dataclass(kw_only=True)
class _Work:
    """The forwards and backwards of this rank's micro-batches, and what turns have in common."""

    rig: Rig
    micro_batches: Sequence[MicroBatch]
    mark: Mark
    alone: bool
    """Whether the window has a single turn."""
    shared: dict[str, Any] = field(default_factory=dict)
    random_states: dict[int, Any] = field(default_factory=dict)
    kept_batch: list[Any] = field(default_factory=list)

    def turn(self, turn: Turn, number: int, told: Told) -> tuple[dict[str, Tensor], dict[str, Units]]:
        """One turn's losses, summed, and their units."""
        rig, mark, count = self.rig, self.mark, len(self.micro_batches)
        sums: dict[str, Tensor] = {}
        found: dict[str, Units] = {}
        for index, micro in enumerate(self.micro_batches):
            mark("fetch")
            if count > 1 and not self.alone:
                self.shared = {}
                self.random_states[index] = _random_state(rig, self.random_states.get(index), number)
            batch = self.kept_batch[0] if self.kept_batch else micro.fetch()
            if count == 1 and not self.alone and not self.kept_batch:
                self.kept_batch.append(batch)
            with rig.engine.accumulating(rig.nets, index == count - 1):
                mark("forward")
                losses = _losses(rig, turn, batch, self.shared)
                loss = _normalised(losses, told) if micro.counts else _nothing(losses)
                if micro.counts:
                    _add(losses, sums, found)
                del losses, batch
                if index == 0 and rig.job.zero_grad == "after_forward":
                    mark("zero_grad")
                    for name in turn.optimizers:
                        rig.optimizers[name].zero_grad(set_to_none=True)
                mark("backward")
                _backward(rig.scaler.scale(loss) if rig.scaler else loss, turn)
                del loss
        return sums, found

    def forget(self) -> None:
        """Drops what the turns had in common."""
        self.shared = {}
        self.kept_batch.clear()


def _turns(rig: Rig) -> list[Turn]:
    """The job's turns, checked."""
    turns = rig.job.turns(list(rig.optimizers))
    if not turns:
        raise InputError(
            f"{type(rig.job).__name__}.turns()",
            "gave no turn",
            "write turns(self, optimizers) -> [memfit.Turn(...), ...]",
        )
    for turn in turns:
        for name in turn.optimizers:
            if name not in rig.optimizers:
                raise InputError(
                    f"turn {turn.name!r}",
                    f"the job has no optimizer {name!r}",
                    f"write one of {', '.join(map(repr, rig.optimizers))}",
                )
    return turns


_BACKWARD_MISTAKES = (
    "modified by an inplace operation",
    "is not implemented",
    "backward through the graph a second time",
)
"""What autograd's engine says, in C++ and far from the line, of a forward that cannot be differentiated."""


def _backward(total: Tensor, turn: Turn) -> None:
    try:
        total.backward()
    except RuntimeError as error:
        if any(words in str(error) for words in _BACKWARD_MISTAKES):
            raise InputError(
                f"turn {turn.name!r}",
                f"its loss has no backward: {describe(error)}",
                "mend the forward of the job's nets or its loss",
            ) from error
        raise


def _losses(rig: Rig, turn: Turn, batch: Any, shared: dict[str, Any]) -> dict[str, tuple[Tensor, Units]]:
    """The turn's losses by name, checked."""
    if rig.job.autocasts_itself or rig.job.precision == "fp32":
        given = turn.loss(rig.nets, batch, shared)
    else:
        with rig.job.autocast(rig.device):
            given = turn.loss(rig.nets, batch, shared)
    named = dict(given) if isinstance(given, Mapping) else {turn.name: given}
    write = "write loss(self, nets, batch) -> (sum over the valid units, number of valid units)"
    if not named:
        raise InputError(f"turn {turn.name!r}", "gave no loss", write)
    losses: dict[str, tuple[Tensor, Units]] = {}
    for name, pair in named.items():
        if not isinstance(pair, tuple) or len(pair) != 2:
            raise InputError(f"loss {name!r}", f"gave {_kind(pair)}, not (sum, units)", write)
        value, count = pair
        if not isinstance(value, Tensor):
            raise InputError(f"loss {name!r}", f"its sum is a {_kind(value)}, not a tensor", write)
        if value.dim() != 0:
            raise InputError(f"loss {name!r}", f"a tensor of shape {tuple(value.shape)}, not a scalar", write)
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
        elif not (isinstance(count, int | float) and 0 < count < math.inf):
            raise InputError(
                f"loss {name!r}",
                f"{count!r} valid units",
                "give the number of samples, frames or tokens in the sum, 1 or more",
            )
        losses[name] = (value, count)
    return losses


def _kind(value: Any) -> str:
    return "tensor" if isinstance(value, Tensor) else type(value).__name__


def _normalised(losses: dict[str, tuple[Tensor, Units]], told: Told) -> Tensor:
    """The sum of the losses, each over the window's units (or the padded units, where those come later)."""
    known = told.known(losses)
    if not known and len(losses) > 1 and len(told.units) > 1:
        raise InputError(
            f"losses {', '.join(losses)}",
            "several losses in several micro-batches, with units that are known too late",
            "write units(self, batch) -> {'name': valid units}",
        )
    total: Tensor | None = None
    for name, (value, count) in losses.items():
        part = value / (known[name] if known else count if len(told.units) == 1 else told.padded)
        total = part if total is None else total + part
    assert total is not None
    return total


def _add(losses: dict[str, tuple[Tensor, Units]], sums: dict[str, Tensor], found: dict[str, Units]) -> None:
    """Adds one micro-batch's losses and units to the window's."""
    for name, (value, count) in losses.items():
        sums[name] = sums[name] + value.detach() if name in sums else value.detach()
        found[name] = found[name] + count if name in found else count


def _nothing(losses: dict[str, tuple[Tensor, Units]]) -> Tensor:
    """A loss of the same graph whose gradients are zero."""
    return torch.stack([value for value, _ in losses.values()]).sum() * 0.0


def _finish_gradients(rig: Rig, turn: Turn, found: Mapping[str, Units], told: Told) -> Tensor | None:
    """Unscales, normalises by the units that were really there, and clips; gives the norm where it clips."""
    parameters = rig.parameters_of(turn.optimizers)
    if rig.scaler:
        for name in turn.optimizers:
            rig.scaler.unscale_(rig.optimizers[name])
    gradients = [p.grad for p in parameters if p.grad is not None]
    if told.known(found) is None and len(told.units) > 1 and gradients:
        (count,) = found.values()
        torch._foreach_mul_(gradients, told.padded / count)
    if rig.job.clip is None:
        return None
    return rig.engine.clip(parameters, rig.job.clip)


def _step(rig: Rig, turn: Turn) -> None:
    for name in turn.optimizers:
        if rig.scaler:
            rig.scaler.step(rig.optimizers[name])
        else:
            rig.engine.step(rig.optimizers[name])


def _random_state(rig: Rig, state: Any, turn: int) -> Any:
    """Remembers the random state at a micro-batch's first turn; puts it back at the later ones."""
    with _disable_current_modes():
        if turn == 0:
            return torch.get_rng_state().numpy().copy()
        torch.set_rng_state(torch.from_numpy(state))
        return state
