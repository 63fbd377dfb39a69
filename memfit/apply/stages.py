"""Windows and validations of nets that are cut into the stages of a pipeline.

Every stage holds a window's batches, and lets go of each when its forward has run. Shapes of what stages pass on follow
from the shapes of a batch's tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from memfit.apply.losses import BackwardMistakes, MicroBatch, WindowUnits, losses_of, summed
from memfit.apply.random_state import random_state, set_random_state
from memfit.apply.train_state import TrainState
from memfit.engine.collectives import Units, is_fake
from memfit.engine.pipeline import Pipeline
from memfit.engine.stage_module import StageInput
from memfit.job import Turn
from memfit.nested_tensors import map_tensors, tensors_in

if TYPE_CHECKING:
    from memfit.apply.turn_cache import TurnCache


def backwards_of_stages(
    train_state: TrainState,
    turn: Turn,
    micro_batches: Sequence[MicroBatch],
    shared: TurnCache,
    mark: Callable[[str], None],
    window_units: WindowUnits,
) -> tuple[dict[str, Tensor], dict[str, Units]]:
    """As ``memfit.apply.window`` runs a turn's forwards and backwards, in the order of the pipeline's schedule.

    Returns:
        The summed losses and their units, on the last stage; gradients are left in the parameters.
    """
    engine = cast(Pipeline, train_state.engine)
    sums: dict[str, Tensor] = {}
    units: dict[str, Units] = {}
    emptied = train_state.job.zero_grad != "after_forward"

    def loss_of(micro: MicroBatch, batch: list[Any]) -> Tensor:
        mark("fetch")
        taken = batch.pop()
        mark("forward")
        losses = losses_of(train_state, turn, taken, shared.values, may_be_empty=bool(micro.ids))
        return summed(turn, micro, losses, window_units, sums, units)

    def after() -> None:
        nonlocal emptied
        if not emptied:
            mark("zero_grad")
            for name in turn.optimizers:
                engine.zero_grad(train_state.optimizers[name])
            emptied = True
        mark("backward")

    def probe(batch: list[Any]) -> None:
        losses_of(train_state, turn, batch[0], shared.values)

    @contextmanager
    def parts(same: Sequence[StageInput]) -> Iterator[None]:
        batches = [micro.batch[0] for micro in same]
        with engine.divide_sequences(train_state.job, train_state.nets, batches) as given:
            del batches
            for micro in same:
                micro.batch[:] = [given.pop(0)] * len(micro.batch)
            yield

    inputs = []
    for micro in micro_batches:
        mark("fetch")
        batch = [shared.fetch(turn, micro, alone=len(micro_batches) == 1)] * len(engine.held_stages)
        inputs.append(_input(train_state, turn.name, batch, partial(probe, batch), partial(loss_of, micro, batch)))
    with engine.accumulating(train_state.nets, True, True), BackwardMistakes(turn):
        engine.run_stages(inputs, train_state.device, after, parts)
    shared.end(turn)
    if is_fake(engine) and not engine.computes_losses:
        counted = [micro for micro in micro_batches if micro.counts]
        sums = {turn.name: torch.zeros((), device=train_state.device)}
        units = {turn.name: sum(micro.padded_units for micro in counted)}
    return sums, units


def validated_by_stages(train_state: TrainState, batch: Any) -> Any:
    """What the job's ``validate`` gives for a batch, on every rank; where ranks are simulated, on the last stage alone.

    Raises:
        InputError: it calls a net several times.
    """
    engine = cast(Pipeline, train_state.engine)
    given: list[Any] = []

    def validate() -> Any:
        given.append(train_state.job.validate(train_state.nets, batch))
        return given[0]

    def probe() -> None:
        train_state.job.validate(train_state.nets, batch)

    engine.run_stages([_input(train_state, "validate", [batch], probe, validate)], train_state.device)
    if is_fake(engine):
        return given[0] if given else {}
    values = map_tensors(given[0], lambda tensor: tensor.detach().cpu()) if given else None
    return engine.of_last_stage(values)


def _input(
    train_state: TrainState, name: str, batch: list[Any], probe: Callable[[], Any], compute: Callable[[], Any]
) -> StageInput:
    """A micro-batch for a schedule, which draws the random numbers that it draws when it is fetched and run at once."""
    drawn = random_state(train_state.device)

    def begin(run: Callable[[], Any]) -> Any:
        set_random_state(drawn, train_state.device)
        return run()

    key = _key(name, batch[0])
    return StageInput(key=key, probe=partial(begin, probe), compute=partial(begin, compute), batch=batch)


def _key(name: str, batch: Any) -> Hashable:
    shapes = tuple((tuple(tensor.shape), tensor.dtype) for tensor in tensors_in(batch))
    return name, shapes, torch.is_grad_enabled()
