"""The lines of metrics.jsonl and samples.jsonl that a window leaves."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from memfit.apply.window import WindowResult
from memfit.batch.windows import Window
from memfit.errors import InputError
from memfit.plan import Plan
from memfit.train.loop.rank_report import RankReport, sum_of_ranks


class WindowNumbers(NamedTuple):
    """What a window gave, as numbers of Python."""

    units: dict[str, float]
    losses: dict[str, float | None]
    """Per valid unit; None where there was none."""
    loss: float | None
    """Their sum."""
    norms: dict[str, float | None]
    skipped: tuple[str, ...]


def numbers_of(result: WindowResult) -> WindowNumbers:
    """The numbers of a window's result."""
    units = {name: float(value) for name, value in result.units.items()}
    losses = {name: float(value) / units[name] if units[name] else None for name, value in result.sums.items()}
    known = [value for value in losses.values() if value is not None]
    norms = {name: None if value is None else float(value) for name, value in result.norms.items()}
    return WindowNumbers(units, losses, sum(known) if known else None, norms, result.skipped)


class EndedWindow(NamedTuple):
    """What a window's line of metrics is made of, beside the reports of the ranks."""

    window: Window
    result: WindowResult
    seconds: float
    readings: dict[str, Any]
    noise_scale: float | None
    validation: dict[str, Any]


def lines_of_window(
    ended: EndedWindow,
    numbers: WindowNumbers,
    reports: Sequence[RankReport],
    shares: Sequence[int],
    plan: Plan,
    more: Mapping[str, Any],
) -> Iterator[tuple[str, dict[str, Any]]]:
    """A window's lines of samples, one for each share, and of metrics, with the names of their files.

    Args:
        numbers: of the window's result.
        reports: of all ranks.
        shares: ranks that took samples of their own.
        more: what else the line of metrics has.
    """
    for number, rank in enumerate(shares):
        yield "samples", {"window": ended.window.number, "rank": number, "ids": reports[rank].ids}
    yield (
        "metrics",
        {
            **window_line(ended.window, numbers, plan),
            **ended.readings,
            "noise_scale": ended.noise_scale,
            **ended.validation,
            **sum_of_ranks(reports, ended.seconds, shares),
            **more,
        },
    )


def window_line(window: Window, numbers: WindowNumbers, plan: Plan) -> dict[str, Any]:
    """Losses, units and norms of a window; how much of it was done follows from the reports of all ranks."""
    return {
        "window": window.number,
        "epoch": window.epoch,
        "loss": numbers.loss,
        "losses": numbers.losses,
        "units": numbers.units,
        "gradient_norm": numbers.norms,
        "skipped": numbers.skipped,
        "global_batch_asked": plan.global_batch,
    }


def check_finite(numbers: WindowNumbers, window: Window) -> None:
    """Raises InputError where the loss is no number any more."""
    if numbers.loss is not None and not math.isfinite(numbers.loss):
        raise InputError(
            f"window {window.number}: loss {numbers.losses}",
            "not a finite number",
            "lower the learning rate, or look at samples " + ", ".join(map(str, window.ids[:8])),
        )
