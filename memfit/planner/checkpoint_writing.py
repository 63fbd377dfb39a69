"""How checkpoints are written: from a copy while training continues, or from the tensors while training waits."""

from __future__ import annotations

from dataclasses import dataclass, replace

from memfit.device.hardware.catalogue import Device
from memfit.footprint import Footprint
from memfit.plan import Plan
from memfit.sizes import format_size

_STATE = ("parameters", "buffers", "optimizer", "ema")


@dataclass(frozen=True, kw_only=True)
class Writing:
    """The choice, why, and the footprint with the copy in it."""

    how: str
    reason: str
    footprint: Footprint


def choose_writing(footprint: Footprint, device: Device) -> Writing:
    """Asynchronous where there is memory for the copy.

    The copy's buffers stay for the whole run, so that they are in every phase: of a CPU's budget, in which they then
    count as ``buffers``. For a card they are pinned memory of the host, and the card holds no second copy.
    """
    copy = _copied(footprint)
    size = format_size(copy)
    if device.is_cuda:
        reason = f"asynchronous: {size} are copied to pinned host memory, which uses no card memory"
        return Writing(how="asynchronous", reason=reason, footprint=footprint)
    if footprint.headroom_bytes < copy:
        reason = f"synchronous: a copy of {size} does not fit next to {footprint.limiting_phase}, so training waits"
        return Writing(how="synchronous", reason=reason, footprint=footprint)
    reason = f"asynchronous: a copy of {size} fits in the budget, and training continues while it is written"
    return Writing(how="asynchronous", reason=reason, footprint=with_copy(footprint))


def with_copy(footprint: Footprint) -> Footprint:
    """The footprint of a CPU's run that keeps the buffers of a copy of its state."""
    copy = _copied(footprint)
    phases = {
        name: replace(
            phase,
            allocated_bytes=phase.allocated_bytes + copy,
            reserved_bytes=phase.reserved_bytes + copy,
            process_bytes=phase.process_bytes + copy,
            process_bytes_low=phase.process_bytes_low + copy,
            process_bytes_high=phase.process_bytes_high + copy,
            categories={**phase.categories, "buffers": phase.categories["buffers"] + copy},
        )
        for name, phase in footprint.phases.items()
    }
    return replace(footprint, phases=phases, headroom_bytes=footprint.headroom_bytes - copy)


def copy_bytes(plan: Plan) -> int:
    """What the copy adds to each phase that a plan predicts; 0 where its run holds none on the device."""
    if plan.checkpoint_writing != "asynchronous" or plan.device != "cpu" or not plan.phases:
        return 0
    phase = plan.phases.get("save") or plan.phases.get("train") or {}
    categories = phase.get("categories", {})  # a plan written by hand may lack some
    return int(sum(categories.get(name, 0) for name in _STATE)) // 2  # the state itself, and its copy among the buffers


def _copied(footprint: Footprint) -> int:
    save = footprint.phases.get("save") or footprint.phases["train"]
    return sum(save.categories[name] for name in _STATE)
