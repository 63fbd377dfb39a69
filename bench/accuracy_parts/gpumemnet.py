"""Predictions for the measured runs of a table, each net traced once, in worker processes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from bench.accuracy_parts.table import MIB, Run
from bench.accuracy_parts.workers import each
from memfit.replay.allocator_config import AllocatorConfig, takes_youngest
from memfit.replay.caching_allocator import CachingAllocator

DEVICE = "a100-40gb"
TORCH = "2.4"
"""The runs' version is not recorded. The newest names in the table are of timm 1.0.9, of August 2024: 2.4 at most."""


@dataclass(frozen=True, kw_only=True)
class Predicted:
    """A run and its prediction, in bytes."""

    run: Run
    net_kind: str
    process_bytes: int
    low: int
    high: int
    need: int
    """Process bytes on a card without a limit."""
    fits: bool
    verdict: str

    @property
    def error(self) -> float:
        """(predicted - measured) / measured."""
        return self.process_bytes / MIB / self.run.measured_mib - 1


@dataclass(frozen=True, kw_only=True)
class Failed:
    """A net that could not be traced, and why."""

    model: str
    why: str


def predict_all(runs: list[Run], context_bytes: int, folder: Path, workers: int) -> Iterator[list[Predicted] | Failed]:
    """Predictions, model by model, as they come. What was traced before is read from ``folder``."""
    by_model: dict[str, list[Run]] = {}
    for run in runs:
        by_model.setdefault(run.model, []).append(run)
    work = partial(_predict_model, context_bytes=context_bytes, folder=folder)
    yield from each(work, by_model.values(), workers)


def _predict_model(runs: list[Run], context_bytes: int, folder: Path) -> list[Predicted] | Failed:
    import torch

    from bench.accuracy_parts.traces import stored

    torch.set_num_threads(1)
    try:
        traced = stored(folder, runs[0].model, [run.batch for run in runs])
    except Exception as error:  # a net's own code may raise anything; the table goes on without it
        return Failed(model=runs[0].model, why=f"{type(error).__name__}: {str(error).splitlines()[0][:200]}")
    return [predict(run, traced.at(run.batch), context_bytes) for run in runs]


def allocator(capacity: int | None = None) -> CachingAllocator:
    """The allocator of the runs' torch."""
    return CachingAllocator(capacity, AllocatorConfig(youngest_first=takes_youngest(TORCH)))


def predict(run: Run, trace: Any, context_bytes: int) -> Predicted:
    """The third window of a run, replayed on the card that the table was measured on."""
    from memfit.device.hardware.catalogue import find_device
    from memfit.planner.predict import footprint_on
    from memfit.replay import footprint
    from memfit.trace.extra_window import with_third_window

    card = find_device(DEVICE)
    card = replace(card, context_bytes=context_bytes, context_low=context_bytes, context_high=context_bytes)
    on_card = footprint_on(trace, card, torch_version=TORCH)
    train = on_card.phases["train"]
    need = train.process_bytes
    if on_card.fits and need > 0.9 * (card.usable_bytes or 0):
        unlimited = footprint(with_third_window(trace), allocator, None, 0)
        need = context_bytes + unlimited.phases["train"].reserved_bytes
    return Predicted(
        run=run,
        net_kind=trace.net_kind,
        process_bytes=train.process_bytes,
        low=train.process_bytes_low,
        high=train.process_bytes_high,
        need=need,
        fits=on_card.fits,
        verdict=on_card.verdict,
    )
