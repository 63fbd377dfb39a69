"""An answer as the JSON of ``memfit plan``."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from memfit.planner.mesh_search.mesh_row import MeshRow
from memfit.planner.search.candidate_search import Candidate
from memfit.planner.search.engine_search import Answer
from memfit.planner.search.full_step import policy_name
from memfit.planner.variable_length.sequence import SequencePrediction


def sequence_json(sequence: SequencePrediction) -> dict[str, Any]:
    """Peaks over a sequence of windows, with default and with expandable segments."""
    plain, expandable = (
        {**asdict(peaks), "ratio": peaks.ratio, "fits": peaks.failed_window is None}
        for peaks in (sequence.plain, sequence.expandable)
    )
    return {**plain, "expandable_segments": expandable}


def plan_json(answer: Answer) -> dict[str, Any]:
    """The JSON of DESIGN.md; ``levers`` repeats ``options`` under its earlier name for one release."""
    shown = answer.chosen or answer.floor
    geometry, footprint = shown.geometry, shown.footprint
    options = [asdict(option) for option in answer.plan.options] if answer.plan else []
    return {
        "fits": answer.plan is not None,
        **(asdict(answer.plan) if answer.plan is not None else {}),
        "verdict": "no" if answer.lengths and not answer.lengths.fits else footprint.verdict,
        "global_batch": geometry.global_batch,
        "micro_batch": geometry.micro_batch,
        "micro_batches": list(geometry.micro_batches[0]),
        "data_parallel": geometry.data_parallel,
        "engine": shown.engine,
        "communication_seconds": shown.communication_seconds,
        "communication": dict(shown.communication),
        "stages": [asdict(stage) for stage in shown.stages],
        "meshes": [_mesh_json(row) for row in answer.meshes],
        "checkpointing": dict(shown.checkpointing),
        "options": options,
        "levers": [{**option, "taken": option["applied"]} for option in options],
        "phases": {phase: asdict(value) for phase, value in footprint.phases.items()},
        "step_seconds": shown.seconds,
        "failed_request": asdict(footprint.failed_request) if footprint.failed_request else None,
        "headroom_bytes": footprint.headroom_bytes,
        "assumed": list(footprint.assumed),
        "tensor_parallel": asdict(footprint.tensor_parallel) if footprint.tensor_parallel else None,
        "alternatives": [_alternative_json(candidate) for candidate in answer.alternatives],
        "next_step": asdict(answer.next_step) if answer.next_step else None,
        "sequence": sequence_json(answer.lengths.sequence) if answer.lengths and answer.lengths.sequence else None,
        "smaller_settings": [asdict(setting) for setting in answer.smaller_settings],
        "dials": [asdict(setting) for setting in answer.smaller_settings],
        "larger_hardware": list(answer.larger_hardware),
        "beneath": list(answer.larger_hardware),
        "learning_rate": asdict(answer.learning_rate),
        "seconds": answer.seconds,
    }


def _mesh_json(row: MeshRow) -> dict[str, Any]:
    return {
        "mesh": row.mesh.sizes(),
        "engine": row.engine,
        "state": row.state,
        "arithmetic": row.arithmetic,
        "policy": row.policy,
        "process_bytes": row.peak,
        "step_seconds": row.seconds,
        "traced": row.traced,
        "remark": row.remark,
    }


def _alternative_json(candidate: Candidate) -> dict[str, Any]:
    return {
        "policy": policy_name(candidate.modes, {}),
        "micro_batch": candidate.geometry.micro_batch,
        "arithmetic": candidate.geometry.arithmetic(),
        "step_seconds": candidate.seconds,
        "process_bytes": candidate.peak,
        "traced": candidate.traced,
    }
