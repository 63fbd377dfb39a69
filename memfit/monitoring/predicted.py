"""The predicted bytes of a training step, from what memfit's other commands write."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from memfit.errors import InputError, why_unreadable
from memfit.footprint import Footprint

KEYS = ("allocated_bytes", "reserved_bytes", "process_bytes")


def predicted_bytes(prediction: Any) -> dict[str, int]:
    """``allocated_bytes``, ``reserved_bytes`` and ``process_bytes`` of the training phase.

    Args:
        prediction: a Prediction, a Footprint, a Plan, the JSON of ``memfit trace`` or ``memfit predict`` (a dict or its
            file), or a plan's file.

    Raises:
        InputError: none of these, or one without a training phase.
    """
    if isinstance(prediction, str | Path):
        return _of_file(Path(prediction))
    footprint = getattr(prediction, "footprint", prediction)
    if isinstance(footprint, Footprint):
        train = footprint.phases.get("train")
        return {key: int(getattr(train, key)) for key in KEYS} if train is not None else {}
    phases = prediction.get("phases") if isinstance(prediction, Mapping) else getattr(prediction, "phases", None)
    train = phases.get("train") if isinstance(phases, Mapping) else None
    if not isinstance(train, Mapping):
        write = "write a Prediction, a plan, or the JSON of memfit trace or memfit predict"
        raise InputError("memfit.watch(prediction=...)", f"{type(prediction).__name__} has no training phase", write)
    return {key: int(train[key]) for key in KEYS if isinstance(train.get(key), int | float)}


def _of_file(path: Path) -> dict[str, int]:
    if path.suffix == ".toml":
        from memfit.plan import read_plan

        return predicted_bytes(read_plan(path))
    write = "write the file of memfit trace --json F, memfit predict --json or memfit plan --out"
    try:
        values = json.loads(path.read_text("utf-8"))
    except (OSError, UnicodeError) as error:
        raise InputError(str(path), f"cannot be read: {why_unreadable(error)}", write) from error
    except (ValueError, RecursionError) as error:
        raise InputError(str(path), "it is not JSON", write) from error
    if not isinstance(values, dict):  # a text would be taken for the path of another file
        raise InputError(str(path), "it is no prediction", write)
    return predicted_bytes(values)
