"""Reasons of a plan, in words: what the request sets, what ranks communicate, and where a pipeline is cut."""

from __future__ import annotations

from collections.abc import Collection

from memfit.planner.pipeline.stage_figures import StageFigures
from memfit.planner.request import PlanRequest
from memfit.planner.search.full_step import ReplayedCandidate
from memfit.planner.timing.mesh_time import REPLICAS, SHARDS
from memfit.planner.timing.roofline import CPU_BANDWIDTH
from memfit.sizes import format_size
from memfit.trace.step import Tracing
from memfit.wording import counted


def requested_reasons(request: PlanRequest, asked: Collection[str]) -> dict[str, str]:
    """Choices that the request makes and not the search, with the reason.

    Args:
        asked: the engine's choices that a person made; the others are those of a search in which nothing else fits.
    """
    reasons = {} if request.micro_batch is None else {"micro_batch": "--micro-batch sets it"}
    if "checkpointing" in request.keep:
        reasons["checkpointing"] = "--keep checkpointing keeps the job's own"
    needed = [name for name in request.engine_choices if name not in asked]
    if request.engine_choices:
        reasons["engine_choices"] = "; ".join(
            ([f"--engine-choice sets {', '.join(asked)}"] if asked else [])
            + ([f"nothing fits without {', '.join(needed)}"] if needed else [])
        )
    if request.mesh is not None:
        reasons["mesh"] = "--mesh sets it"
    if request.mesh is not None and request.links is None:
        reasons["mesh"] += "; the time in which ranks tell each other is not estimated, since no link is known"
    if request.mesh is not None and request.mesh.pp > 1:
        reasons["mesh"] += "; the time in which stages wait for the first and the last micro-batch is estimated"
        reasons["mesh"] += ", as is that of what they send" if request.links is not None else ""
        reasons.setdefault("checkpointing", "stages of a pipeline keep as the job does, or recompute every block")
    return reasons


def communication_reason(candidate: ReplayedCandidate) -> dict[str, str]:
    """What ranks tell each other in a window, and how much of it the window waits for."""
    if not candidate.communication:
        return {}
    parts = [f"{name} {seconds:.2g} s" for name, seconds in candidate.communication.items()]
    dimensions = dict.fromkeys(name.rpartition(" over ")[2] for name in candidate.communication)
    inside = [name for name in dimensions if name not in (REPLICAS, SHARDS)]
    waits = []
    if len(inside) < len(dimensions):
        seconds = f"{candidate.communication_seconds:.2g} s"
        waits.append(f"the window waits {seconds} for data-parallel ranks, and computation hides the rest of theirs")
    if inside:
        waits.append(f"what the window waits for the ranks of {' and '.join(inside)} is in its time")
    return {"communication": "; ".join([", ".join(parts), *waits])}


def host_reason(host_bytes: int, how: Tracing) -> dict[str, str]:
    """What state takes of the host's memory, and how its step is timed; nothing where it is on the device.

    Args:
        host_bytes: of each rank.
    """
    if not host_bytes:
        return {}
    each = " for each rank" if how.world > 1 else ""
    words = f"{format_size(host_bytes)} of host memory{each}, beside the budget"
    if "host" not in (how.optimizer_state, how.average):  # else it visits the card, which computes
        words += f"; its step there is timed at {CPU_BANDWIDTH / 1e9:g} GB/s, as of one core"
    return {"state_on_host": words}


def with_refusal(reasons: dict[str, str], refuses_single: str) -> dict[str, str]:
    """The reasons, with why splits into single items were left out.

    Args:
        refuses_single: what the nets raise at a micro-batch of one item; empty: nothing.
    """
    if not refuses_single:
        return reasons
    left_out = f"{reasons['micro_batch']}; splits with a micro-batch of 1 are left out: the nets refuse one item"
    return {**reasons, "micro_batch": left_out}


def stage_reason(stages: tuple[StageFigures, ...]) -> dict[str, str]:
    """Where the nets are cut, and why, in words; nothing without stages."""
    if not stages:
        return {}
    words = [
        f"stage {number} from {stage.first_module}: {counted(stage.modules, 'module')}, {stage.seconds:.2g} s"
        + (f", {format_size(stage.process_bytes)}" if stage.process_bytes is not None else "")
        for number, stage in enumerate(stages)
    ]
    return {"stages": f"cut so that the slowest stage takes least time and all fit; {'; '.join(words)}"}
