"""Variants of the best candidate that are traced, one option changed at a time: micro-batches and optimizer steps."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import zip_longest

import numpy as np

from memfit.apply.optimizer_implementation import implementation_of
from memfit.apply.state_streaming import PART
from memfit.device.hardware.catalogue import Device
from memfit.engine.capabilities import WHOLE_STATE
from memfit.errors import describe
from memfit.events import TO_DEVICE
from memfit.geometry import Geometry, split
from memfit.job import Nets, Shape
from memfit.planner.live_bytes import GRAIN, live_bytes_of
from memfit.planner.options import validation_policies
from memfit.planner.predict import plain_nets, with_precision
from memfit.planner.search.batch_splits import sizes
from memfit.planner.search.candidate_search import Candidate, CandidateSearch
from memfit.trace.session import MicroTrace

VISITING = 4
"""Times its bytes that a parameter's state is at most, where one alone visits."""
KINDS = ("foreach", "fused")
"""Implementations of a step that are options."""


@dataclass(frozen=True, kw_only=True)
class TracedVariant:
    """A micro-batch's forward and backward, or a step."""

    peak: int
    """Peak bytes of tensors, everything resident included."""
    seconds: float | None = None
    """Seconds of a whole window with the option; None where that is not known."""


@dataclass(frozen=True, kw_only=True)
class OptionTraces:
    """Variants by name. One that is absent could not be traced, or has nothing to change."""

    micro: Mapping[str, TracedVariant] = field(default_factory=dict)
    """``chosen``, and in its place ``keep``, ``full``, ``offload``, ``at once``, ``split`` in two, ``precision``."""
    split_in: str = ""
    """The arithmetic of ``split``."""
    resized: Shape | None = None
    """The micro-batch of ``split``, or of ``at once``."""
    steps: Mapping[str, TracedVariant] = field(default_factory=dict)
    """``chosen``, ``own`` as the job has it, those of ``KINDS``, and ``by parts`` with state that waits on the host."""
    own_kinds: frozenset[str] = frozenset()
    """How the job's own optimizers step."""
    lacking: str = ""
    """Optimizers that have but one way to step."""
    streamed_bytes: int = 0
    """Bytes of optimizer state that would wait on the host, or does."""
    kept_bytes: int = 0
    """Process bytes of the micro-batch with everything kept."""
    unknown: Mapping[str, str] = field(default_factory=dict)
    """By option, why it was not traced."""


def trace_options(search: CandidateSearch, best: Candidate, nets: Nets, *, by_precision: bool) -> OptionTraces:
    """Traces them, while the drafts' session is open.

    Args:
        nets: the job's, without their bytes.
        by_precision: whether others may be built in another precision.
    """
    shape, accumulated = search.shape(best.geometry)
    traced_job = search.traced_job
    chosen = traced_job.trace(shape, best.modes, accumulated=accumulated)
    variants = {"chosen": TracedVariant(peak=_peak(chosen, search.device), seconds=best.seconds)}
    variants |= _recomputing(search, best, shape, accumulated)
    geometry, others = _sizes(search, best, chosen)
    variants |= others
    steps, streamed = _steps(search, best, variants["chosen"].peak)
    others, unknown = _precision(search, best, nets if by_precision else None, shape, accumulated)
    variants |= others
    optimizers = search.job.optimizers(nets)
    kinds = {name: implementation_of(optimizer, search.device.is_cuda) for name, optimizer in optimizers.items()}
    return OptionTraces(
        micro=variants,
        split_in=geometry.arithmetic() if geometry else "",
        resized=search.traced_job.how.shape_of(search.job, geometry.micro_batch) if geometry else None,
        steps=steps,
        own_kinds=frozenset(kind for kind in kinds.values() if kind),
        lacking=", ".join(type(optimizers[name]).__name__ for name, kind in kinds.items() if kind is None),
        streamed_bytes=streamed,
        kept_bytes=search.kept_peak(best.geometry.micro_batch),
        unknown=unknown,
    )


def _recomputing(search: CandidateSearch, best: Candidate, shape: Shape, accumulated: bool) -> dict[str, TracedVariant]:
    """The micro-batch with everything kept, every block recomputed, and every block's activations on the host."""
    traced_job, device = search.traced_job, search.device
    blocks = traced_job.blocks(shape, accumulated=accumulated)
    kept = traced_job.kept(shape, accumulated=accumulated)
    variants = {
        "keep": TracedVariant(
            peak=_peak(kept, device), seconds=search.seconds(best.geometry, traced_job.total_seconds(kept))
        )
    }
    for mode in ("full", "offload") if blocks else ():
        if mode == "offload" and not device.is_cuda:
            continue
        traced = traced_job.trace(shape, dict.fromkeys(blocks, mode), accumulated=accumulated)
        seconds = traced_job.total_seconds(traced) + traced_job.overhead_seconds(shape, mode, accumulated=accumulated)
        known = mode == "full" or device.link_bytes is not None
        window = search.seconds(best.geometry, seconds) if known else None
        variants[mode] = TracedVariant(peak=_peak(traced, device), seconds=window)
    return variants


def _sizes(
    search: CandidateSearch, best: Candidate, chosen: MicroTrace
) -> tuple[Geometry | None, dict[str, TracedVariant]]:
    """The whole share at once where it is accumulated, else in two micro-batches; under the same modes."""
    traced_job, count = search.traced_job, max(map(len, best.geometry.micro_batches))
    geometry = other_geometry(search, best)
    if geometry is None:
        return None, {}
    name = "at once" if count > 1 else "split"
    micro = geometry.micro_batch
    traced = traced_job.trace(traced_job.how.shape_of(search.job, micro), best.modes, accumulated=name == "split")
    seconds = None
    if search.device.is_cuda:
        beyond = best.micro_seconds - traced_job.total_seconds(chosen)
        seconds = search.seconds(geometry, traced_job.total_seconds(traced) + max(beyond, 0.0))
    elif not best.modes:
        seconds = search.seconds(geometry, search.kept_seconds(micro))
    return geometry, {name: TracedVariant(peak=_peak(traced, search.device), seconds=seconds)}


def other_geometry(search: CandidateSearch, best: Candidate) -> Geometry | None:
    """The whole share at once where it is accumulated, else in two micro-batches; None where it cannot be split."""
    share = max(sum(rank) for rank in best.geometry.micro_batches)
    accumulates = max(map(len, best.geometry.micro_batches)) > 1
    others = [share] if accumulates else sizes(share, search.job.longest or 1, None)[1:2]
    if not others:
        return None
    return split(best.geometry.global_batch, others[0], search.job.unit, search.ranks, best.geometry.devices_each)


def _steps(search: CandidateSearch, best: Candidate, micro_peak: int) -> tuple[dict[str, TracedVariant], int]:
    """Steps by name, and the bytes of state that would wait on the host, or does.

    A step whose state visits part by part is traced where it could be above the micro-batch's peak; else it takes at
    most what is given.
    """
    traced_job, device = search.traced_job, search.device
    how, own = traced_job.how, traced_job.optimizer_step()
    assert own is not None
    kinds = {
        implementation_of(optimizer, device.is_cuda)
        for optimizer in search.job.optimizers(traced_job.session.train_state.nets).values()
    }
    kinds -= {None}
    asked = {"chosen": "job", "own": kinds.pop() if len(kinds) == 1 else "job", **{kind: kind for kind in KINDS}}
    variants: dict[str, TracedVariant] = {}
    window = best.seconds
    for name, kind in asked.items():
        traced = traced_job.optimizer_step(kind or "job")
        if traced is None:
            continue
        seconds = None
        if window is not None and (device.is_cuda or name == "chosen"):
            more = traced_job.total_seconds(traced) - traced_job.total_seconds(own)
            seconds = window + more * search.slower
        variants[name] = TracedVariant(peak=_peak(traced, device), seconds=seconds)
    crossing = np.isin(np.array(own.trace.names), TO_DEVICE)[own.trace.operator_name]
    moved = int(own.trace.operator_bytes[crossing].sum())
    if how.optimizer_state == "host" or not device.is_cuda or how.engine not in WHOLE_STATE:
        return variants, moved
    state = traced_job.session.streamed_bytes(GRAIN)
    largest = max((p.nbytes for some in traced_job.session.train_state.stepped.values() for p in some), default=0)
    least = variants["chosen"].peak - state + 2 * (PART + VISITING * largest)
    if state and least <= micro_peak - state:
        variants["by parts"] = TracedVariant(peak=least)
    elif state:
        parts = traced_job.optimizer_step(by_parts=True)
        assert parts is not None
        variants["by parts"] = TracedVariant(peak=_peak(parts, device))
    return variants, state


def _precision(
    search: CandidateSearch, best: Candidate, nets: Nets | None, shape: Shape, accumulated: bool
) -> tuple[dict[str, TracedVariant], dict[str, str]]:
    """The micro-batch in the other precision, where the job builds the same nets in it; or why not.

    Args:
        nets: what must be the same; None: they are.
    """
    job, traced_job, device = search.job, search.traced_job, search.device
    other = validation_policies.other_precision(job)
    chosen = traced_job.trace(shape, best.modes, accumulated=accumulated)
    try:
        if nets is not None and not _same(nets, plain_nets(with_precision(job, other))):
            return {}, {"precision": f"the job builds other nets in {other}: memfit predict --precision {other}"}
        traced = traced_job.trace(shape, best.modes, accumulated=accumulated, precision=other)
    except Exception as error:  # the job's own code, in a precision that nobody may have tried
        traced_job.pause()
        return {}, {"precision": f"in {other} the job raises {describe(error)}"}
    seconds = None
    if device.is_cuda and traced_job.knows_rates:
        more = traced_job.total_seconds(traced, other) - traced_job.total_seconds(chosen)
        seconds = search.seconds(best.geometry, best.micro_seconds + more)
    return {"precision": TracedVariant(peak=_peak(traced, device), seconds=seconds)}, {}


def _same(nets: Nets, others: Nets) -> bool:
    """Whether their tensors have the same types and shapes."""
    mine, theirs = (
        [t for net in some.values() for t in (*net.parameters(), *net.buffers())] for some in (nets, others)
    )
    return all(
        a is not None and b is not None and (a.dtype, a.shape) == (b.dtype, b.shape)
        for a, b in zip_longest(mine, theirs)
    )


def _peak(traced: MicroTrace, device: Device) -> int:
    return live_bytes_of(traced.trace, device).peaks()["train"]
