"""Predictions as JSON, as a line for a budget, and as files."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from memfit.errors import unwritable
from memfit.printable import one_line
from memfit.sizes import format_size
from memfit.wording import units_in_words

if TYPE_CHECKING:
    from memfit.device.hardware.catalogue import Device
    from memfit.planner.prediction import Prediction


def predictions_json(predictions: list[Prediction], sequence: Any, limit: int | None) -> dict[str, Any]:
    """Returns the JSON of one prediction, or of every device's by name."""
    answers = []
    for prediction in predictions:
        budget = {} if limit is None else {"budget_bytes": limit, "within_budget": highest_peak(prediction) <= limit}
        answers.append(prediction_json(prediction) | budget)
    if len(answers) > 1:
        return {"devices": {answer["device"]["name"]: answer for answer in answers}}
    if sequence is None:
        return answers[0]
    from memfit.planner.plan_json import sequence_json

    return answers[0] | {"sequence": sequence_json(sequence)}


def prediction_json(prediction: Prediction) -> dict[str, Any]:
    """Returns the JSON of one prediction."""
    footprint = asdict(prediction.footprint)
    device = prediction.device
    return {
        "job": prediction.job,
        "settings": prediction.settings,
        "micro_batch": prediction.micro_batch,
        "unit": prediction.unit,
        "shape": asdict(prediction.shape),
        "device": {"name": device.key, "memory_bytes": device.memory_bytes, "usable_bytes": device.usable_bytes},
        "nets": [asdict(net) for net in prediction.nets],
        **footprint,
        "checkpointing": dict(prediction.checkpointing),
        "engine": prediction.engine,
        "world": prediction.world,
        "rank": prediction.rank,
        "mesh": dict(prediction.mesh),
        "rank_reason": prediction.rank_reason,
        "stages": [asdict(stage) for stage in prediction.stages],
        "not_validated": list(prediction.not_validated),
        "seconds": prediction.seconds,
    }


def budget_line(prediction: Prediction, limit: int) -> str:
    """Says whether a prediction is within a budget, as an annotation of a GitHub workflow, and where it is but does not
    fit, that."""
    peak, fits = highest_peak(prediction), prediction.footprint.fits
    kind = "notice" if peak <= limit and fits else "error"
    words = "exceeds" if peak > limit else "is within"
    more = "" if fits or peak > limit else f" but does not fit in {format_size(prediction.device.usable_bytes or 0)}"
    what = f"{prediction.job} with {units_in_words(prediction.micro_batch, prediction.unit)} on {prediction.device.key}"
    return one_line(
        f"::{kind}::{what} needs {format_size(peak)}, which {words} the budget of {format_size(limit)}{more}."
    )


def highest_peak(prediction: Prediction) -> int:
    """Bytes of the process in the phase that needs most."""
    return max(phase.process_bytes for phase in prediction.footprint.phases.values())


def write_snapshot_file(path: str, prediction: Prediction, device: Device) -> None:
    """Writes the predicted timeline for PyTorch's memory_viz.

    Raises:
        InputError: it cannot be written.
    """
    from memfit.show.snapshot import write_snapshot
    from memfit.show.timeline import allocator_limit

    try:
        write_snapshot(Path(path), prediction.trace, allocator_limit(device))
    except OSError as error:
        raise unwritable(f"--snapshot {path}", error) from error


def write_trace_file(path: Path, prediction: Prediction) -> None:
    """Writes the events: ``.npz`` for memfit report, any other ending for ui.perfetto.dev."""
    from memfit.show.perfetto import write_perfetto
    from memfit.show.trace_file import write_trace

    if path.suffix == ".npz":
        write_trace(path, prediction)
    else:
        write_perfetto(path, prediction.trace, f"{prediction.job} on {prediction.device.name}")
