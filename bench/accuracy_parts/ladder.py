"""Which mechanism brings how much: the same runs, predicted with one rule after another."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import track

from bench.accuracy_parts.gpumemnet import allocator
from bench.accuracy_parts.statistics import weighted_median
from bench.accuracy_parts.table import MIB, Run, models_in_order
from bench.accuracy_parts.workers import each
from memfit.events import ALLOCATE, CATEGORIES, EMPTY_CACHE, FREE, Trace
from memfit.trace.extra_window import with_third_window

_console = Console(stderr=True)
WORKSPACE = CATEGORIES.index("workspace")
RUNGS = (
    "naive", "naive + constant", "live bytes + constant", "allocator", "+ cache emptied by plan searches",
    "+ prefetcher's stream", "+ convolution workspace", "+ third step",
)  # fmt: skip


FACTORS = (0.75, 1.0, 1.25, 1.5, 2.0)
"""Of the convolution workspace, tried beside."""
MODELS = 12
"""Models that the ladder is climbed on."""


def ladder(runs: Sequence[Run], folder: Path, workers: int) -> dict[str, Any]:
    """Errors of runs that ran, by rule."""
    chosen = models_in_order(list(runs))[:MODELS]
    ran = [run for run in runs if run.label == "ran" and run.model in chosen]
    climbs = list(track(each(partial(_climb, folder=folder), ran, workers), "ladder", total=len(ran), console=_console))
    return {"models": len(chosen), "runs": len(ran), "rungs": errors(climbs)}


def _climb(run: Run, folder: Path) -> tuple[Run, list[float]]:
    return run, rungs(run, _stored(run, folder))


def by_factor(runs: Sequence[Run], folder: Path, workers: int) -> list[dict[str, float]]:
    """Errors of runs that ran by factor of the convolution workspace, with the constant that suits each best."""
    ran = [run for run in runs if run.label == "ran"]
    replayed = each(partial(_at_each_factor, folder=folder), ran, workers)
    replays = list(track(replayed, "workspaces", total=len(ran), console=_console))
    measured = np.array([run.measured_mib for run, _ in replays])
    tried = []
    for factor, reserved in zip(FACTORS, np.array([sizes for _, sizes in replays]).T, strict=True):
        constant = weighted_median(measured - reserved, 1 / measured)
        sizes = np.abs(reserved + constant - measured) / measured
        tried.append(
            {
                "factor": factor,
                "constant_mib": round(constant),
                "median": float(np.median(sizes)),
                "p90": float(np.percentile(sizes, 90)),
                "p95": float(np.percentile(sizes, 95)),
                "within_5_percent": float((sizes <= 0.05).mean()),
            }
        )
    return tried


def _at_each_factor(run: Run, folder: Path) -> tuple[Run, list[float]]:
    trace = _stored(run, folder)
    return run, [_reserved(with_third_window(with_workspace(trace, factor))) for factor in FACTORS]


def _stored(run: Run, folder: Path) -> Trace:
    from bench.accuracy_parts.traces import stored

    return stored(folder, run.model, [run.batch]).at(run.batch)


def rungs(run: Run, trace: Trace) -> list[float]:
    """MiB by rung, without the constant."""
    plain = _without(trace, emptied=True, beside=True, scratch=True)
    emptied = _without(trace, beside=True, scratch=True)
    prefetched = _without(trace, scratch=True)
    reserved = [_reserved(kept) for kept in (plain, emptied, prefetched, trace, with_third_window(trace))]
    return [run.naive_mib, run.naive_mib, _live(plain), *reserved]


def errors(table: list[tuple[Run, list[float]]]) -> list[dict[str, Any]]:
    """Statistics of each rung, its constant fitted to these very runs by weighted median (none for the first)."""
    measured = np.array([run.measured_mib for run, _ in table])
    rows = []
    for number, name in enumerate(RUNGS):
        predicted = np.array([values[number] for _, values in table])
        constant = weighted_median(measured - predicted, 1 / measured) if number else 0.0
        sizes = np.abs(predicted + constant - measured) / measured
        rows.append(
            {
                "rule": name,
                "constant_mib": round(constant),
                "median": float(np.median(sizes)),
                "mean": float(sizes.mean()),
                "p90": float(np.percentile(sizes, 90)),
                "p95": float(np.percentile(sizes, 95)),
                "within_5_percent": float((sizes <= 0.05).mean()),
                "worst_under": float(((measured - predicted - constant) / measured).max()),
            }
        )
    return rows


def with_workspace(trace: Trace, factor: float) -> Trace:
    """The trace with ``factor`` times the workspaces of convolutions' backward."""
    names = np.array(["convolution_backward" in name for name in trace.names])
    scaled = (trace.category == WORKSPACE) & names[trace.operator_name[trace.made_by]]
    return dataclasses.replace(trace, nbytes=np.where(scaled, (trace.nbytes * factor).astype(np.int64), trace.nbytes))


def _without(trace: Trace, *, emptied: bool = False, beside: bool = False, scratch: bool = False) -> Trace:
    gone = np.zeros(len(trace.kind), bool)
    storage = trace.storage
    if emptied:
        gone |= trace.kind == EMPTY_CACHE
    if beside:
        gone |= (storage >= 0) & (trace.stream[storage] > 0)
    if scratch:
        gone |= (storage >= 0) & (trace.category[storage] == WORKSPACE)
    before = np.concatenate([[0], np.cumsum(~gone)])
    return dataclasses.replace(
        trace, kind=trace.kind[~gone], storage=storage[~gone], operator=trace.operator[~gone],
        phases=tuple((name, int(before[start]), int(before[end])) for name, start, end in trace.phases),
    )  # fmt: skip


def _reserved(trace: Trace) -> float:
    replayed = allocator()
    for kind, storage in zip(trace.kind.tolist(), trace.storage.tolist(), strict=True):
        if kind == ALLOCATE:
            replayed.malloc(storage, int(trace.nbytes[storage]), int(trace.stream[storage]))
        elif kind == FREE:
            replayed.free(storage)
        else:
            replayed.empty_cache()
    return replayed.peak_reserved / MIB


def _live(trace: Trace) -> float:
    sizes = (trace.nbytes + 511) // 512 * 512
    moved = np.where(trace.kind == EMPTY_CACHE, 0, trace.kind.astype(np.int64) * sizes[trace.storage])
    return float(np.cumsum(moved).max()) / MIB
