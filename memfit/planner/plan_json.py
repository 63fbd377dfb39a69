"""An answer as the JSON of ``memfit plan``."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from memfit.planner.search.full_step import policy_name
from memfit.planner.search.search import Answer
from memfit.planner.variable_length.sequence import SequencePrediction


def sequence_json(sequence: SequencePrediction) -> dict[str, Any]:
    """Peaks over the windows, and the same under expandable segments."""
    plain, expandable = (
        {**asdict(found), "ratio": found.ratio, "fits": found.failed_window is None}
        for found in (sequence.plain, sequence.expandable)
    )
    return {**plain, "expandable_segments": expandable}


def plan_json(answer: Answer) -> dict[str, Any]:
    """The JSON of DESIGN.md."""
    found: dict[str, Any] = {"fits": answer.plan is not None}
    shown = answer.chosen or answer.floor
    geometry, replayed = shown.geometry, shown.footprint
    if answer.plan is not None:
        found |= asdict(answer.plan)
    found |= {
        "verdict": "no" if answer.lengths and not answer.lengths.fits else replayed.verdict,
        "global_batch": geometry.global_batch,
        "micro_batch": geometry.micro_batch,
        "micro_batches": list(geometry.micro_batches[0]),
        "data_parallel": geometry.data_parallel,
        "engine": shown.engine,
        "communication_seconds": shown.communication_seconds,
        "checkpointing": dict(shown.checkpointing),
        "levers": [asdict(lever) for lever in answer.plan.levers] if answer.plan else [],
        "phases": {phase: asdict(value) for phase, value in replayed.phases.items()},
        "step_seconds": shown.seconds,
        "failed_request": asdict(replayed.failed_request) if replayed.failed_request else None,
        "headroom_bytes": replayed.headroom_bytes,
        "assumed": list(replayed.assumed),
    }
    found["alternatives"] = [
        {
            "policy": policy_name(candidate.modes, {}),
            "micro_batch": candidate.geometry.micro_batch,
            "arithmetic": candidate.geometry.arithmetic(),
            "step_seconds": candidate.seconds,
            "process_bytes": candidate.peak,
            "traced": candidate.traced,
        }
        for candidate in answer.alternatives
    ]
    found["next_step"] = asdict(answer.next_step) if answer.next_step else None
    found["sequence"] = sequence_json(answer.lengths.found) if answer.lengths and answer.lengths.found else None
    found["dials"] = [asdict(dial) for dial in answer.smaller_settings]
    found["beneath"] = list(answer.larger_hardware)
    found["learning_rate"] = asdict(answer.learning_rate)
    found["seconds"] = answer.seconds
    return found
