"""The answer of ``memfit trace`` as JSON."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from memfit.script.outcome import ScriptOutcome, TraceRequest

if TYPE_CHECKING:
    from memfit.script.batch_scan import BatchScan


def answer_json(request: TraceRequest, outcome: ScriptOutcome, scan: BatchScan | None) -> dict[str, Any]:
    """Returns ``phases``, ``fits`` and ``verdict`` as in the JSON of ``memfit predict``, and the fields of scripts."""
    footprint = asdict(outcome.footprint) if outcome.footprint is not None else _nothing()
    enough = outcome.windows >= 2
    return {
        "script": request.command.target,
        "args": list(request.command.args),
        "device": {"name": request.device, "memory_bytes": request.memory_bytes},
        "world": outcome.world,
        "rank": request.rank,
        **footprint,
        "verdict": footprint["verdict"] if enough else None,
        "windows": outcome.windows,
        "ended": outcome.ended,
        "optimizers": [{"where": where, "steps": steps} for where, steps in outcome.steps],
        "peak_bytes": outcome.peak_bytes,
        "lines": [asdict(line) for line in outcome.lines],
        "kept": [asdict(kept) for kept in outcome.kept],
        "growth": [asdict(growth) for growth in outcome.growth],
        "options": [asdict(option) for option in outcome.options],
        "cards": [asdict(card) for card in outcome.cards],
        "largest_batch": None if scan is None else asdict(scan.largest),
        "assumed": [asdict(answer) for answer in outcome.assumed],
        "not_seen": list(outcome.not_seen),
        "files_not_written": [asdict(change) for change in outcome.files],
        "failed_attempts": outcome.failed_attempts,
        "error": None if outcome.error is None else asdict(outcome.error),
        "sandboxed": outcome.sandboxed,
        "seconds": outcome.seconds,
        "processor_seconds": outcome.processor_seconds,
    }


def _nothing() -> dict[str, Any]:
    return {
        "phases": {}, "fits": None, "verdict": None, "limiting_phase": None, "headroom_bytes": None,
        "failed_request": None,
    }  # fmt: skip
