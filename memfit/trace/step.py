"""A job becomes a Trace: its window, validation and saving are run on fake tensors, without their memory or time."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

from memfit.apply.checkpointing import recompute
from memfit.apply.phase_memory import phase_memory, with_settings
from memfit.apply.train_state import TrainState, build
from memfit.apply.window import run_window
from memfit.device.hardware.catalogue import Device
from memfit.device.virtual.assumptions import unknown_integer, unknown_integers
from memfit.device.virtual.card_rules import card_rules, note_fact
from memfit.device.virtual.library_patches import as_in_a_real_run
from memfit.device.virtual.patching import replaced
from memfit.device.virtual.value_masks import Walks
from memfit.device.virtual.virtual_device import Virtual, virtual_cpu, virtual_gpu
from memfit.engine.capabilities import CAPABILITIES
from memfit.engine.factory import load_engine, make_engine, traced_engine
from memfit.errors import InputError
from memfit.events import Trace
from memfit.forked_process import NoResultError
from memfit.frame_room import in_frame_room
from memfit.geometry import shape_of
from memfit.job import Job, Shape
from memfit.mesh import MeshShape
from memfit.nested_tensors import tensors_in
from memfit.plan import PhasePolicy
from memfit.trace.categories import categorise_state, mark
from memfit.trace.collectives import layer_groups
from memfit.trace.columns import as_trace
from memfit.trace.doubtful_sizes import without_other_numbers
from memfit.trace.followed_validation import (
    attributes_of,
    changes_since,
    validation_follows,
    with_what_follows,
)
from memfit.trace.operator_scratch import Call, with_scratch
from memfit.trace.polynomial import fit
from memfit.trace.prepared_job import prepare_job, take_prepared
from memfit.trace.record_by_shape import split_by_shape
from memfit.trace.repeated_loops import traced_repeats
from memfit.trace.scratch_by_size import ScratchBySize
from memfit.trace.second_window import second_window_follows
from memfit.trace.step_phases import (
    check_stepped,
    fetch_synthetic,
    save_once,
    synthetic_micro_batch,
    validate_once,
)
from memfit.trace.trace_family import Kind, Member, TraceFamily, sample_shapes
from memfit.trace.tracer import Tracer
from memfit.trace.untraced_copy import before_trace, is_untraced_copy_needed, recorded_in_copy

AS_IT_IS = PhasePolicy(gradients="keep")
"""A phase for which no room is made."""


@dataclass(frozen=True, kw_only=True)
class Tracing:
    """How a job is traced.

    Attributes:
        device: the card whose rules hold, or the catalogue's ``cpu``.
        micro_batches: micro-batches in a window; above two the further ones repeat the second, but for stages of a
            pipeline.
        checkpointing: mode by module path, see ``memfit.apply.checkpointing``.
        scratch: whether a trace of one shape has what operators allocate inside of themselves.
        scratch_by_size: what spares steps of more items measurements on a CPU.
        engine: how the nets are put onto ranks; one of ``memfit.engine.factory``'s names.
        world: ranks.
        mesh: the ranks by dimension; None: all of them in the one that the engine is for.
        rank: which of them is traced.
        engine_choices: what the engine lets one choose, such as FSDP2's ``half_gather``.
        implementation: of the optimizers' steps, as a plan has it.
    """

    device: Device
    micro_batches: int = 1
    checkpointing: Mapping[str, str] = field(default_factory=dict)
    scratch: bool = True
    scratch_by_size: ScratchBySize | None = None
    engine: str = "single"
    world: int = 1
    mesh: MeshShape | None = None
    rank: int = 0
    engine_choices: Mapping[str, Any] = field(default_factory=dict)
    implementation: str = "job"
    optimizer_state: str = "device"
    average: str = "device"
    """Where the optimizer state and the weights' average are kept between steps, as in a plan."""
    validation: PhasePolicy = AS_IT_IS
    """What makes room for validation; by default nothing does."""
    saving: PhasePolicy = AS_IT_IS
    like: Trace | None = None
    """The same step at another size or on another card; a second window that follows from it is not traced."""
    facts_of_like: frozenset[str] | None = None
    """What that trace asked of its card, where this one answers the same: a validation that follows is then not traced
    either. None: it answers otherwise."""

    @property
    def traced_micro_batches(self) -> int:
        """Of several stages all, since some are on their way at once."""
        return self.micro_batches if self.stages > 1 else min(self.micro_batches, 2)

    @property
    def stages(self) -> int:
        """Stages of a pipeline."""
        return self.mesh.pp if self.mesh is not None else 1

    def shape_of(self, job: Job, units: int) -> Shape:
        """The shape of a micro-batch of so many units, as ``divided`` has it."""
        return self.divided(job, shape_of(job, units))

    def divided(self, job: Job, shape: Shape) -> Shape:
        """The shape; where ranks divide its tokens, as long as they divide."""
        if shape.length is None or self.mesh is None:
            return shape
        parts = self.mesh.tp if self.engine_choices.get("sequence_parallel") else 1
        if self.mesh.cp > 1:
            parts *= self.mesh.cp * (2 if job.causal_attention else 1)
        length = -(-shape.length // parts) * parts
        return replace(shape, length=min(length, job.longest or length))


@in_frame_room
def trace_job(job: Job, shape: Shape, how: Tracing) -> Trace:
    """One job's memory events: setup, two windows (the first makes the optimizers' state), validation and saving.

    With what operators allocate inside of themselves, unless ``how.scratch`` is off; a family is without it.
    """
    trace, _, _, calls = _record(job, [shape], how)
    trace = without_other_numbers(trace, type(job), lambda: _record(job, [shape], how)[0])
    if not how.scratch:
        return trace
    by_size = how.scratch_by_size
    estimates = by_size.estimates(how.rank, shape.items, trace, calls) if by_size is not None else {}
    trace = with_scratch(trace, calls, estimates)
    if how.like is None:
        return trace
    return with_what_follows(trace, how.like) or trace_job(job, shape, replace(how, like=None))


def trace_family(job: Job, how: Tracing, like: Shape) -> TraceFamily:
    """The job traced at a few shapes, from which the others follow.

    Args:
        like: any shape of the kind that will be asked for, with or without a length.
    """

    def traced(kind: Kind) -> Member:
        shapes = sample_shapes(like, kind)
        trace, sizes, made, _ = _record(job, shapes, how)
        trace = without_other_numbers(trace, type(job), lambda: _record(job, shapes, how)[0])
        return Member(shape=shapes[0], trace=trace, polynomials=fit(shapes, sizes, made))

    return TraceFamily(lambda shape: trace_job(job, shape, how), traced)


@contextmanager
def virtual_job(job: Job, how: Tracing) -> Iterator[tuple[Virtual, Tracer, TrainState]]:
    """Context in which the job is set up on the virtual device, and everything is recorded."""
    before_trace(_record_in_copy)
    prepared = take_prepared(job, how)
    if prepared is None:
        with _set_up(job, how) as set_up:
            yield set_up
        return
    set_up, stack = prepared
    with stack:
        yield set_up


@contextmanager
def _set_up(job: Job, how: Tracing) -> Iterator[tuple[Virtual, Tracer, TrainState]]:
    load_engine(how.engine)
    with (
        on_virtual_device(how.device) as virtual,
        as_in_a_real_run(),
        simulated_ranks(how, tracer := Tracer(virtual)),
        tracer.recording(),
    ):
        engine = make_engine(how.engine, virtual.device, how.mesh, **how.engine_choices)
        if how.mesh is not None and how.mesh.dp_shard_in_ep > 1:
            virtual.assumptions.of_ranks.append(equal_tokens(how.mesh))
        virtual.assumptions.walks = Walks(assumed=_walks.get(type(job), {}))
        with tracer.phase("setup"):
            train_state = build(
                job, virtual.device, engine, how.implementation, optimizer_state=how.optimizer_state,
                average=how.average,
            )  # fmt: skip
            tracer.name_modules(train_state.nets)
            categorise_state(tracer, train_state)
            if how.mesh is not None and how.mesh.tp > 1:
                from memfit.engine.tensor_parallel import cut_parameters

                tracer.tensor_parallel = cut_parameters(train_state.nets)
        yield virtual, tracer, train_state


def prepare(job: Job, device: Device) -> None:
    """Sets a job up on a card, for the next trace of it on one rank (``memfit.trace.prepared_job``)."""
    how = Tracing(device=device)
    prepare_job(job, how, lambda: _set_up(job, how))


def equal_tokens(mesh: MeshShape) -> str:
    """What is said of experts whose tokens come from other ranks."""
    return (
        f"routers send as many tokens to each of the {mesh.sending} ranks of {' and '.join(mesh.expert_dimensions)}; "
        "a rank whose experts get more needs more"
    )


def run_two_windows(train_state: TrainState, tracer: Tracer, shape: Shape, how: Tracing) -> None:
    """The first two windows of a job that is set up: the first one makes the optimizers' state.

    The second one is left out where it follows from ``how.like``.
    """
    with recompute(train_state.nets, how.checkpointing):
        for is_first in (True, False):
            if not is_first and how.like is not None and second_window_follows(_traced(tracer), how.like):
                return
            with tracer.phase("train"):
                micro = synthetic_micro_batch(train_state.job, shape, train_state.device, tracer)
                repeated = [micro] * how.traced_micro_batches
                check_stepped(run_window(train_state, repeated, lambda part: mark(tracer, train_state, part)))
                categorise_state(tracer, train_state)
                if is_first:
                    tracer.collect_cycles()


def _traced(tracer: Tracer) -> Trace:
    """What was traced until now."""
    return with_scratch(as_trace(tracer), tracer.call_memory.calls)


_Record = tuple[Trace, list[np.ndarray | None] | None, np.ndarray, list[Call]]
"""The first shape's trace; bytes of the varying storages at every shape, where its events are the same; which these
are; calls that may have scratch."""
_MOST_TRACES = 3
"""Traces at most, each of which assumes the selections by values that the one before showed."""
_walks: dict[type, dict[str, int]] = {}
"""By the job's class, the lines that select by one value after another; known within this process."""


def _record(job: Job, shapes: list[Shape], how: Tracing) -> _Record:
    """Records a job once, and again where lines select by one value after another, which that showed."""
    for _ in range(_MOST_TRACES):
        assumed = _walks.get(type(job), {})
        record, observed = _record_once(job, shapes, how)
        if observed == assumed:
            return record
        _walks[type(job)] = observed
    _walks[type(job)] = {}
    return _record_once(job, shapes, how)[0]


def _record_once(job: Job, shapes: list[Shape], how: Tracing) -> tuple[_Record, dict[str, int]]:
    """(the record, the lines that select by one value after another), where nothing of earlier traces is left."""
    if is_untraced_copy_needed():
        own, assumed = replace(how, scratch_by_size=None), _walks.get(type(job), {})
        with suppress(NoResultError):
            record: tuple[_Record, dict[str, int]] = recorded_in_copy(job, shapes, own, assumed, unknown_integer())
            return record
    return _record_here(job, shapes, how)


def _record_in_copy(
    job: Job, shapes: list[Shape], how: Tracing, assumed: dict[str, int], integer: int
) -> tuple[_Record, dict[str, int]]:
    """``_record_here`` for another process, with what that one assumes."""
    _walks[type(job)] = assumed
    with unknown_integers(integer):
        return _record_here(job, shapes, how)


def _record_here(job: Job, shapes: list[Shape], how: Tracing) -> tuple[_Record, dict[str, int]]:
    with virtual_job(job, how) as (virtual, tracer, train_state):
        before = attributes_of(train_state) if job.validates else []
        run_two_windows(train_state, tracer, shapes[0], how)
        tracer.changed_by_windows = changes_since(before)
        if job.validates and how.validation.where == "here" and not _is_validation_known(tracer, how):
            with tracer.phase("validate"), phase_memory(train_state, how.validation):
                validate_under(train_state, shapes[0], tracer, how.validation)
        with tracer.phase("save"), phase_memory(train_state, how.saving):
            tracer.mark("save")
            save_once(train_state)
        phases = list(tracer.phases)
        validates_anew = (
            job.validates and how.validation.where == "here" and _changes_validation(job, shapes, virtual.device)
        )
        with recompute(train_state.nets, how.checkpointing):
            for shape in shapes[1:]:
                with tracer.phase("train"):
                    micro = synthetic_micro_batch(job, shape, virtual.device, tracer)
                    repeated = [micro] * how.traced_micro_batches
                    run_window(train_state, repeated, lambda part: mark(tracer, train_state, part), step=False)
                if validates_anew:
                    with tracer.phase("validate"), phase_memory(train_state, how.validation):
                        validate_under(train_state, shape, tracer, how.validation)
        observed = virtual.assumptions.walks.observed()
        return (*split_by_shape(tracer, phases, len(shapes)), tracer.call_memory.calls), observed


def _is_validation_known(tracer: Tracer, how: Tracing) -> bool:
    """Whether validation follows from that of ``how.like``."""
    if how.like is None or how.facts_of_like is None or how.stages > 1:
        return False
    is_known = tracer.changed_by_windows == how.like.fixed_validation != ""
    if not is_known or not validation_follows(_traced(tracer), how.like):
        return False
    for fact in how.facts_of_like:
        note_fact(fact)
    return True


def _changes_validation(job: Job, shapes: Sequence[Shape], device: torch.device) -> bool:
    """Whether what is validated depends on the training micro-batch's shape."""
    with device:
        batches = [job.validation_batch(shape) for shape in shapes]
    return len({tuple((tensor.shape, tensor.dtype) for tensor in tensors_in(batch)) for batch in batches}) > 1


def validate_under(train_state: TrainState, shape: Shape, tracer: Tracer, policy: PhasePolicy) -> None:
    """Validation; loops whose turns do the same run a few of them."""
    asked = replace(train_state, job=with_settings(train_state.job, policy.settings))
    if policy.items is not None:
        shape = Shape(items=min(policy.items, shape.items), length=shape.length)
    with replaced(asked.job, repeats=traced_repeats(tracer)):
        _validate_all(asked, shape, tracer)


def _validate_all(train_state: TrainState, shape: Shape, tracer: Tracer) -> None:
    validate_once(
        train_state,
        lambda: fetch_synthetic(train_state.job, shape, train_state.device, tracer, validation=True),
        tracer.mark,
    )


@contextmanager
def on_virtual_device(device: Device) -> Iterator[Virtual]:
    try:
        with virtual_gpu(card_rules(device)) if device.is_cuda else virtual_cpu() as virtual:
            yield virtual
    except RuntimeError as error:
        if "device_ready_queues_" not in str(error):
            raise
        raise InputError(
            f"a trace for {device.key} in a process that has run a backward before",
            "autograd's engine started without knowing the virtual card",
            "trace before the first backward, or in a process of its own",
        ) from error


def simulated_ranks(how: Tracing, tracer: Tracer) -> AbstractContextManager[Any]:
    """The process group of which one rank is traced."""
    from memfit.device.virtual.fake_group import predicted_ranks, simulated_neighbours

    tracer.layer_groups = layer_groups(how.mesh)
    ranks = ExitStack()
    ranks.enter_context(predicted_ranks(how.world, rank=how.rank, quiet=tracer.quiet, mesh=str(how.mesh or "data")))
    if how.stages > 1:
        ranks.enter_context(simulated_neighbours())
    if CAPABILITIES[how.engine].several_ranks:
        ranks.enter_context(traced_engine(how.engine, tracer.virtual.device))
    return ranks
