"""What is traced beside the best draft, one lever changed at a time: micro-batches and optimizers' steps."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import zip_longest

import numpy as np

from memfit.apply.implementation import implementation_of
from memfit.apply.rig import WHOLE_STATE
from memfit.apply.streaming import PART
from memfit.device.catalogue import Device
from memfit.errors import describe
from memfit.events import TO_DEVICE
from memfit.geometry import Geometry, shape_of, split
from memfit.job import Nets, Shape
from memfit.planner import phase_room
from memfit.planner.course import GRAIN, course_of
from memfit.planner.drafts import Draft, Drafts, sizes
from memfit.planner.predict import plain_nets, with_precision
from memfit.trace.session import MicroTrace

VISITING = 4
"""Times its bytes that a parameter's state is at most, where one alone visits."""
KINDS = ("foreach", "fused")
"""Implementations of a step that are levers."""


@dataclass(frozen=True, kw_only=True)
class Alone:
    """A micro-batch's forward and backward, or a step."""

    peak: int
    """Of tensors' bytes, all that is resident included."""
    seconds: float | None = None
    """Of a whole window with it; None where that is not known."""


@dataclass(frozen=True, kw_only=True)
class Beside:
    """By name; a lever that is not in here could not be traced, or has nothing to change."""

    micro: Mapping[str, Alone] = field(default_factory=dict)
    """``chosen``, and in its place ``keep``, ``full``, ``offload``, ``at once``, ``split`` in two, ``precision``."""
    split_in: str = ""
    """The arithmetic of ``split``."""
    resized: Shape | None = None
    """The micro-batch of ``split``, or of ``at once``."""
    steps: Mapping[str, Alone] = field(default_factory=dict)
    """``chosen``, ``own`` as the job has it, those of ``KINDS``, and ``by parts`` with state that waits on the host."""
    own_kinds: frozenset[str] = frozenset()
    """How the job's own optimizers step."""
    lacking: str = ""
    """Optimizers that have but one way to step."""
    streamed_bytes: int = 0
    """Of state that would wait on the host, or does."""
    kept_bytes: int = 0
    """Process bytes of the micro-batch with everything kept."""
    unknown: Mapping[str, str] = field(default_factory=dict)
    """By lever, why it was not traced."""


def beside(drafts: Drafts, best: Draft, nets: Nets, *, by_precision: bool) -> Beside:
    """Traces them, while the drafts' session is open.

    Args:
        nets: the job's, without their bytes.
        by_precision: whether others may be built in another precision.
    """
    shape, accumulated = drafts.shape(best.geometry)
    fitting = drafts.fitting
    chosen = fitting.trace(shape, best.modes, accumulated=accumulated)
    found = {"chosen": Alone(peak=_peak(chosen, drafts.device), seconds=best.seconds)}
    found |= _recomputing(drafts, best, shape, accumulated)
    geometry, others = _sizes(drafts, best, chosen)
    found |= others
    steps, streamed = _steps(drafts, best, found["chosen"].peak)
    others, unknown = _precision(drafts, best, nets if by_precision else None, shape, accumulated)
    found |= others
    optimizers = drafts.job.optimizers(nets)
    kinds = {name: implementation_of(one, drafts.device.is_cuda) for name, one in optimizers.items()}
    return Beside(
        micro=found,
        split_in=geometry.arithmetic() if geometry else "",
        resized=shape_of(drafts.job, geometry.micro_batch) if geometry else None,
        steps=steps,
        own_kinds=frozenset(kind for kind in kinds.values() if kind),
        lacking=", ".join(type(optimizers[name]).__name__ for name, kind in kinds.items() if kind is None),
        streamed_bytes=streamed,
        kept_bytes=drafts.kept_peak(best.geometry.micro_batch),
        unknown=unknown,
    )


def _recomputing(drafts: Drafts, best: Draft, shape: Shape, accumulated: bool) -> dict[str, Alone]:
    """The same micro-batch with everything kept, every block recomputed, and every block's on the host."""
    fitting, device = drafts.fitting, drafts.device
    blocks = fitting.blocks(shape, accumulated=accumulated)
    kept = fitting.kept(shape, accumulated=accumulated)
    found = {
        "keep": Alone(peak=_peak(kept, device), seconds=drafts.seconds(best.geometry, fitting.total_seconds(kept)))
    }
    for mode in ("full", "offload") if blocks else ():
        if mode == "offload" and not device.is_cuda:
            continue
        traced = fitting.trace(shape, dict.fromkeys(blocks, mode), accumulated=accumulated)
        seconds = fitting.total_seconds(traced) + fitting.overhead_seconds(shape, mode, accumulated=accumulated)
        known = mode == "full" or device.link_bytes is not None
        window = drafts.seconds(best.geometry, seconds) if known else None
        found[mode] = Alone(peak=_peak(traced, device), seconds=window)
    return found


def _sizes(drafts: Drafts, best: Draft, chosen: MicroTrace) -> tuple[Geometry | None, dict[str, Alone]]:
    """The whole share at once where it is accumulated, else in two micro-batches; under the same modes."""
    fitting, count = drafts.fitting, max(map(len, best.geometry.micro_batches))
    share = max(sum(rank) for rank in best.geometry.micro_batches)
    if count > 1:
        name, micro = "at once", share
    else:
        smaller = sizes(share, drafts.job.longest, None)[1:2]
        if not smaller:
            return None, {}
        name, micro = "split", smaller[0]
    geometry = split(best.geometry.global_batch, micro, drafts.job.unit, drafts.ranks)
    traced = fitting.trace(shape_of(drafts.job, micro), best.modes, accumulated=name == "split")
    seconds = None
    if drafts.device.is_cuda:
        beyond = drafts.micro_seconds(best) - fitting.total_seconds(chosen)
        seconds = drafts.seconds(geometry, fitting.total_seconds(traced) + max(beyond, 0.0))
    elif not best.modes:
        seconds = drafts.seconds(geometry, drafts.kept_seconds(micro))
    return geometry, {name: Alone(peak=_peak(traced, drafts.device), seconds=seconds)}


def _steps(drafts: Drafts, best: Draft, micro_peak: int) -> tuple[dict[str, Alone], int]:
    """Steps by name, and the bytes of state that would wait on the host, or does.

    A step whose state visits part by part is traced where it could be above the micro-batch's peak; else it takes at
    most what is given.
    """
    fitting, device = drafts.fitting, drafts.device
    how, own = fitting.how, fitting.optimizer_step()
    assert own is not None
    kinds = {implementation_of(one, device.is_cuda) for one in drafts.job.optimizers(fitting.session.rig.nets).values()}
    kinds -= {None}
    asked = {"chosen": "job", "own": kinds.pop() if len(kinds) == 1 else "job", **{kind: kind for kind in KINDS}}
    found: dict[str, Alone] = {}
    window = best.seconds
    for name, kind in asked.items():
        traced = fitting.optimizer_step(kind or "job")
        if traced is None:
            continue
        seconds = None
        if window is not None and (device.is_cuda or name == "chosen"):
            more = fitting.total_seconds(traced) - fitting.total_seconds(own)
            seconds = window + more * drafts.slower
        found[name] = Alone(peak=_peak(traced, device), seconds=seconds)
    crossing = np.isin(np.array(own.trace.names), TO_DEVICE)[own.trace.operator_name]
    moved = int(own.trace.operator_bytes[crossing].sum())
    if how.optimizer_state == "host" or not device.is_cuda or how.engine not in WHOLE_STATE:
        return found, moved
    state = fitting.session.streamed_bytes(GRAIN)
    largest = max((p.nbytes for some in fitting.session.rig.stepped.values() for p in some), default=0)
    least = found["chosen"].peak - state + 2 * (PART + VISITING * largest)
    if state and least <= micro_peak - state:
        found["by parts"] = Alone(peak=least)
    elif state:
        parts = fitting.optimizer_step(by_parts=True)
        assert parts is not None
        found["by parts"] = Alone(peak=_peak(parts, device))
    return found, state


def _precision(
    drafts: Drafts, best: Draft, nets: Nets | None, shape: Shape, accumulated: bool
) -> tuple[dict[str, Alone], dict[str, str]]:
    """The same micro-batch in the other precision, where the job builds the same nets in it; or why not.

    Args:
        nets: what must be the same; None: they are.
    """
    job, fitting, device = drafts.job, drafts.fitting, drafts.device
    other = phase_room.other_precision(job)
    chosen = fitting.trace(shape, best.modes, accumulated=accumulated)
    try:
        if nets is not None and not _same(nets, plain_nets(with_precision(job, other))):
            return {}, {"precision": f"the job builds other nets in {other}: memfit predict --precision {other}"}
        traced = fitting.trace(shape, best.modes, accumulated=accumulated, precision=other)
    except Exception as error:  # the job's own code, in a precision that nobody may have tried
        fitting.pause()
        return {}, {"precision": f"in {other} the job raises {describe(error)}"}
    seconds = None
    if device.is_cuda and fitting.knows_rates:
        more = fitting.total_seconds(traced, other) - fitting.total_seconds(chosen)
        seconds = drafts.seconds(best.geometry, drafts.micro_seconds(best) + more)
    return {"precision": Alone(peak=_peak(traced, device), seconds=seconds)}, {}


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
    return course_of(traced.trace, device).peaks()["train"]
