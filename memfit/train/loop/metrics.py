"""The line of metrics.jsonl that a window leaves."""

from __future__ import annotations

import math
from typing import Any

from memfit.apply.window import WindowResult
from memfit.batch.windows import Window
from memfit.errors import InputError
from memfit.plan import Plan


def window_line(window: Window, result: WindowResult, done: int, seconds: float, plan: Plan) -> dict[str, Any]:
    """Losses, units, norms, sizes and speed of a window.

    Args:
        done: padded units that were learnt from.
    """
    units = {name: float(value) for name, value in result.units.items()}
    losses = {name: float(value) / units[name] if units[name] else None for name, value in result.sums.items()}
    known = [value for value in losses.values() if value is not None]
    return {
        "window": window.number,
        "epoch": window.epoch,
        "loss": sum(known) if known else None,
        "losses": losses,
        "units": units,
        "gradient_norm": {name: None if value is None else float(value) for name, value in result.norms.items()},
        "skipped": list(result.skipped),
        "global_batch_asked": plan.global_batch,
        "global_batch_done": done,
        "seconds": seconds,
        "units_per_second": done / seconds,
    }


def check_finite(line: dict[str, Any], window: Window) -> None:
    """Raises InputError where the loss is no number any more."""
    if line["loss"] is not None and not math.isfinite(line["loss"]):
        raise InputError(
            f"window {window.number}: loss {line['losses']}",
            "not a finite number",
            "lower the learning rate, or look at samples " + ", ".join(map(str, window.ids[:8])),
        )
