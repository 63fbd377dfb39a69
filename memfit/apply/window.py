"""A window: the micro-batches of one optimizer step. Losses are divided by the valid units of the whole window.

    N = sum over micro-batches (and ranks) of valid units;  L = sum over units of the loss / N

With one micro-batch, N is its own count. With several, N is either known before the first backward (``Job.units``) or
comes from the losses: then the backwards run on ``sum / P`` with P the padded units, and the gradients are multiplied
by P / N before they are clipped. This is the same up to rounding.

A turn has two halves. Its gradients may be computed again, in other micro-batches; its step happens once. ``Guard``
holds what a runner wraps around each half.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from memfit.apply.job_objects import JobCall
from memfit.apply.kept_gradients import check_kept, kept_gradients
from memfit.apply.losses import BackwardMistakes, MicroBatch, WindowUnits, known_units, losses_of, summed
from memfit.apply.stages import backwards_of_stages
from memfit.apply.state_streaming import streamed, streams
from memfit.apply.train_state import TrainState, update_ema
from memfit.apply.turn_cache import TurnCache
from memfit.engine.collectives import NOTHING, Units, gather_shares, together, total
from memfit.errors import InputError
from memfit.job import Job, Turn
from memfit.torch_compat.grad_scaler import allow_another_step

Mark = Callable[[str], None]
"""Called when a part of the window begins: fetch, forward, backward, clip, optimizer, zero_grad, ema."""


class TurnGradients(NamedTuple):
    """The result of a turn's forwards and backwards; the gradients themselves are in the parameters, ready to step."""

    sums: Mapping[str, Tensor]
    """Each loss, summed over all valid units."""
    units: Mapping[str, Units]
    norm: Tensor | None
    """Norm of the gradients before they were clipped; None if they were not clipped."""
    micro_batches: Sequence[MicroBatch]
    """The micro-batches that were used."""
    empty: bool
    """Whether no loss had any valid unit, so that there is nothing to step."""


class WindowResult(NamedTuple):
    """The result of a window: its losses, their units, and each turn's gradient norm (None if it was not clipped)."""

    sums: dict[str, Tensor]
    """Each loss, summed over all valid units."""
    units: dict[str, Units]
    norms: dict[str, Tensor | None]
    skipped: tuple[str, ...]
    """Turns that took no step because the window had no valid unit."""
    micro_batches: Sequence[MicroBatch]
    """The micro-batches of the last turn."""

    @property
    def losses(self) -> dict[str, Tensor]:
        """Each loss per valid unit."""
        return {name: value / self.units[name] for name, value in self.sums.items()}


Attempt = Callable[[Sequence[MicroBatch]], TurnGradients]


@dataclass(frozen=True, kw_only=True)
class Guard:
    """What a runner wraps around the two halves of a turn; by default nothing."""

    gradients: Callable[[Attempt, Sequence[MicroBatch]], TurnGradients] = lambda attempt, parts: attempt(parts)
    """Called with the half that may be repeated, and the micro-batches to start with."""
    once: Callable[[Callable[[], None], Optimizer | None, Sequence[Tensor]], None] = lambda act, optimizer, tensors: (
        act()
    )
    """Called with an action that must happen exactly once, the optimizer that it steps, and other tensors that it
    changes.
    """
    norms: bool = False
    """Whether the norm of the gradients is computed even if they are not clipped."""


def _ignore(part: str) -> None:
    pass


def run_window(
    train_state: TrainState,
    micro_batches: Sequence[MicroBatch],
    mark: Mark = _ignore,
    *,
    step: bool = True,
    guard: Guard = Guard(),
) -> WindowResult:
    """Runs forward and backward of every micro-batch, clips and steps, turn by turn, on all ranks of the engine.

    Args:
        micro_batches: this rank's part of the window.
        step: False leaves the weights unchanged: gradients are computed and freed.

    Raises:
        InputError: a loss is not a scalar tensor or has no units, or several losses give their units too late.
        RanksOutOfMemoryError: a rank ran out of memory while it computed gradients; every rank raises it.
    """
    turns = _turns(train_state)
    shared = TurnCache(train_state, turns)
    made: list[TurnGradients] = []
    skipped: list[str] = []
    for turn in turns:

        def attempt(parts: Sequence[MicroBatch], turn: Turn = turn) -> TurnGradients:
            shared.begin(turn)
            return _gradients(train_state, turn, parts, shared, mark, finish=step, norms=guard.norms)

        made.append(guard.gradients(attempt, micro_batches))
        micro_batches = made[-1].micro_batches
        if made[-1].empty:
            skipped.append(turn.name)
        elif step:
            mark("optimizer")
            for name in turn.optimizers:
                guard.once(partial(_step, train_state, train_state.optimizers[name]), train_state.optimizers[name], ())
        if train_state.job.zero_grad == "after_step" or not step:
            mark("zero_grad")
            for optimizer in train_state.optimizers.values():
                train_state.engine.zero_grad(optimizer)
    if step:
        _after_the_steps(train_state, mark, guard, stepped=len(skipped) < len(turns))
    units = {name: count for gradients in made for name, count in gradients.units.items()}
    return WindowResult(
        sums={name: value for gradients in made for name, value in gradients.sums.items()},
        units=units,
        norms={turn.name: gradients.norm for turn, gradients in zip(turns, made, strict=True)},
        skipped=tuple(skipped),
        micro_batches=micro_batches,
    )


def _gradients(
    train_state: TrainState,
    turn: Turn,
    micro_batches: Sequence[MicroBatch],
    shared: TurnCache,
    mark: Mark,
    *,
    finish: bool,
    norms: bool,
) -> TurnGradients:
    """Computes the gradients of a turn over all micro-batches, into the parameters; with ``finish``, normalised and
    clipped.
    """
    engine, shared_by_ranks = train_state.engine, train_state.shares(turn.optimizers)
    own = WindowUnits.by(micro_batches)
    all_ranks = shared_by_ranks and engine.world > 1
    window_units = WindowUnits.by_all(gather_shares(engine, own), engine.context_ranks) if all_ranks else own
    with together(engine):
        backwards = backwards_of_stages if engine.stages > 1 else _backwards
        sums, units = backwards(train_state, turn, micro_batches, shared, mark, window_units)
    mark("clip")
    all_sums, all_units = total(engine, sums, units)
    if shared_by_ranks:
        units = all_units
    norm, empty = None, _none_valid(units)
    if finish and not (empty if units is all_units else _none_valid(all_units)):
        if all_ranks:
            parameters = train_state.parameters_of(turn.optimizers)
            with together(engine):
                prepared = engine.prepare(parameters)
            engine.reduce(prepared)
            del prepared
        with together(engine):
            norm = None if empty else _finish_gradients(train_state, turn, units, window_units, norms)
    return TurnGradients(sums=all_sums, units=all_units, norm=norm, micro_batches=micro_batches, empty=empty)


def _backwards(
    train_state: TrainState,
    turn: Turn,
    micro_batches: Sequence[MicroBatch],
    shared: TurnCache,
    mark: Mark,
    window_units: WindowUnits,
) -> tuple[dict[str, Tensor], dict[str, Units]]:
    """Returns this rank's summed losses and their units; gradients are left in the parameters."""
    engine, shared_by_ranks = train_state.engine, train_state.shares(turn.optimizers)
    sums: dict[str, Tensor] = {}
    units: dict[str, Units] = {}
    for index, micro in enumerate(micro_batches):
        mark("fetch")
        batch = shared.fetch(turn, micro, alone=len(micro_batches) == 1)
        last, parts = index == len(micro_batches) - 1, engine.context_ranks
        divided = engine.divide_sequences(train_state.job, train_state.nets, [batch]) if parts > 1 else None
        with engine.accumulating(train_state.nets, last, shared_by_ranks), divided or NOTHING as part:
            if part is not None:
                batch = part.pop()
            mark("forward")
            del part
            kept = kept_gradients(train_state, turn) if index == 1 else ()
            losses = losses_of(train_state, turn, batch, shared.values, may_be_empty=bool(micro.ids))
            check_kept(train_state, turn, kept)
            del kept
            loss = summed(turn, micro, losses, window_units, sums, units)
            del losses, batch
            if index == 0 and train_state.job.zero_grad == "after_forward":
                mark("zero_grad")
                for name in turn.optimizers:
                    train_state.engine.zero_grad(train_state.optimizers[name])
            mark("backward")
            scaled = train_state.scaler.scale(loss) if train_state.scaler else loss
            with BackwardMistakes(turn):
                scaled.backward()
            del scaled
            del loss
    shared.end(turn)
    return sums, units


def _none_valid(units: Mapping[str, Units]) -> bool:
    """Whether no loss had any valid unit. A trace follows the comparison; a count that is read it would have to assume,
    and a step that rests on what was assumed is traced twice."""
    return all(bool(count == 0) for count in units.values())


def _turns(train_state: TrainState) -> list[Turn]:
    """Returns the job's turns, checked. A job may give other turns in every window; the default ones are made once."""
    if train_state.turns is not None:
        return train_state.turns
    turns = train_state.job.turns(list(train_state.optimizers))
    write = "write turns(self, optimizers) -> [memfit.Turn(...), ...]"
    seen = f"{type(train_state.job).__name__}.turns()"
    if not isinstance(turns, Sequence) or not all(isinstance(turn, Turn) for turn in turns):
        raise InputError(seen, f"gave {type(turns).__name__}, not a list of turns", write)
    if not turns:
        raise InputError(seen, "gave no turn", write)
    for turn in turns:
        for name in turn.optimizers:
            if name not in train_state.optimizers:
                raise InputError(
                    f"turn {turn.name!r}",
                    f"the job has no optimizer {name!r}",
                    f"write one of {', '.join(map(repr, train_state.optimizers))}",
                )
    if getattr(train_state.job.turns, "__func__", None) is Job.turns:
        train_state.turns = turns
    return turns


def _finish_gradients(
    train_state: TrainState, turn: Turn, units: Mapping[str, Units], window_units: WindowUnits, norms: bool
) -> Tensor | None:
    """Unscales the gradients, normalises them by the units that were valid, and clips them; returns the norm if it is
    wanted.
    """
    parameters = train_state.parameters_of(turn.optimizers)
    if train_state.scaler:
        for name in turn.optimizers:
            train_state.scaler.unscale_(train_state.optimizers[name])
    gradients = train_state.engine.gradients(parameters)
    if norms or train_state.job.clip is not None:
        _check_dense(train_state, gradients)
    if not known_units(window_units, units) and window_units.count > 1 and gradients:
        (count,) = units.values()
        torch._foreach_mul_(gradients, window_units.padded / count)
    if train_state.job.clip is not None:
        return train_state.engine.clip(parameters, train_state.job.clip)
    return train_state.engine.clip(parameters, math.inf) if norms and gradients else None


def _check_dense(train_state: TrainState, gradients: Sequence[Tensor]) -> None:
    """Raises InputError where a gradient is sparse, which has no norm to be checked or clipped by."""
    if all(gradient.layout is torch.strided for gradient in gradients):
        return
    names = [
        f"{name}.{path}"
        for name, net in train_state.nets.items()
        for path, parameter in net.named_parameters()
        if parameter.grad is not None and parameter.grad.layout is not torch.strided
    ]
    why = "it is sparse, and memfit takes the norm of dense gradients"
    write = "write sparse=False where the module is made, and an optimizer of dense gradients"
    raise InputError(f"gradient of {', '.join(names) or 'a parameter'}", why, write)


def _step(train_state: TrainState, optimizer: Optimizer) -> None:
    """Takes one step. A caller may step parameter by parameter, which a gradient scaler would refuse."""
    with stepping(train_state, optimizer):
        if train_state.scaler:
            train_state.scaler.step(optimizer)
            allow_another_step(train_state.scaler, optimizer)
        else:
            train_state.engine.step(optimizer)


def stepping(train_state: TrainState, optimizer: Optimizer) -> AbstractContextManager[None]:
    """Context of a step: brings optimizer state that waits on the host to the device."""
    if train_state.optimizer_state == "host" and streams(optimizer):
        return streamed(optimizer, train_state.device)
    return NOTHING


def _after_the_steps(train_state: TrainState, mark: Mark, guard: Guard, *, stepped: bool) -> None:
    """Updates what follows a window's steps: the loss scale, the schedules, the average."""
    if train_state.scaler and stepped:
        train_state.scaler.update()
    for name, schedule in train_state.schedules.items():
        write = "write one in schedules(self, optimizers, windows) that lasts for that many windows"
        with JobCall(f"schedule {name!r}", write):
            schedule.step()
    train_state.engine.share_buffers(train_state.nets)
    if train_state.ema:
        mark("ema")
        averages = [tensor for net in train_state.ema.values() for tensor in (*net.parameters(), *net.buffers())]
        guard.once(partial(update_ema, train_state), None, averages)
