"""timm's training benchmark under AMP: the batch that ran on a card, and the next size that did not.

Table: ``model,layout,torch,img_size,batch_that_ran,next_size_that_failed`` (the last one empty where the largest size
that was tried ran). The script is timm's benchmark.py: autocast without a scaler around forward and backward,
cudnn.benchmark, SGD with momentum, one batch that stays on the card.
"""

from __future__ import annotations

import csv
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from bench.accuracy_parts import environments
from bench.accuracy_parts.loop import Loop, trace_loop
from bench.accuracy_parts.sampling import fair_sample
from bench.accuracy_parts.traces import SMALL, Traced, trace_batches
from bench.accuracy_parts.workers import each
from memfit.device.hardware.catalogue import Device, find_device, with_torch

COLUMNS = ("model", "layout", "torch", "img_size", "batch_that_ran", "next_size_that_failed")
ENVIRONMENT = "timm-0.6.13"
"""One version for all rows: attention is the same code from 0.4 to 0.6, and this one has the nets of the others."""
TOTAL_BYTES = 25_447_170_048
"""What drivers of 2021 and 2022 report for an RTX 3090: 23.70 GiB in torch's messages."""


@dataclass(frozen=True, kw_only=True)
class FitRun:
    """A row of the table. ``failed`` is None where nothing failed."""

    model: str
    layout: str
    torch: str
    image: int
    ran: int
    failed: int | None


@dataclass(frozen=True, kw_only=True)
class FitAnswer:
    """A row with the two predictions: (fits, verdict, need over the card's usable bytes) by batch."""

    run: FitRun
    net_kind: str
    ran: tuple[bool, str, float]
    failed: tuple[bool, str, float] | None


@dataclass(frozen=True, kw_only=True)
class Untraced:
    """What could not be traced, and why."""

    name: str
    why: str


def read(path: Path) -> list[FitRun]:
    """The table's rows."""
    with path.open(newline="") as file:
        return [
            FitRun(
                model=row["model"], layout=row["layout"], torch=row["torch"], image=int(row["img_size"]),
                ran=int(row["batch_that_ran"]),
                failed=int(row["next_size_that_failed"]) if row["next_size_that_failed"] else None,
            )
            for row in csv.DictReader(file)
        ]  # fmt: skip


def card(torch_version: str = "1.12") -> Device:
    """The RTX 3090 of the runs, with what CUDA held there under a version of torch."""
    device = with_torch(find_device("rtx3090"), torch_version)
    held_back = (device.memory_bytes or 0) - (device.usable_bytes or 0)
    return replace(device, memory_bytes=TOTAL_BYTES, usable_bytes=TOTAL_BYTES - held_back)


def loop_of(run: FitRun, batch: int) -> Loop:
    """benchmark.py's loop."""
    return Loop(
        net=run.model, kind="timm", environment=ENVIRONMENT, batch=batch, image=run.image, precision="fp16-autocast",
        optimizer="timm-sgd", channels_last=run.layout == "nhwc", cudnn_benchmark=True, backward_in_autocast=True,
        keeps_batch=True, step_is_function=True, torch=run.torch, iterations=2,
    )  # fmt: skip


def _is_before_1_11(run: FitRun) -> bool:
    return loop_of(run, run.ran).is_before((1, 11))


def answers(runs: Sequence[FitRun], workers: int) -> Iterator[list[FitAnswer] | Untraced]:
    """Predictions, net by net, as they come."""
    environments.install(ENVIRONMENT)
    groups: dict[tuple[str, str, int], list[FitRun]] = {}
    for run in runs:
        groups.setdefault((run.model, run.layout, run.image), []).append(run)
    yield from each(_group, list(groups.values()), workers)


def _group(runs: list[FitRun]) -> list[FitAnswer] | Untraced:
    environments.enter(ENVIRONMENT)
    import torch

    torch.set_num_threads(1)
    device = card()
    batches = sorted({batch for run in runs for batch in (run.ran, run.failed) if batch})
    try:
        traced: dict[bool, Traced] = {}
        for run in sorted(runs, key=_is_before_1_11):
            age, later = _is_before_1_11(run), traced.get(False)
            if later is not None and not _has_softmax(later):
                traced[age] = later
            elif age not in traced:
                traced[age] = _traced(run, batches, device)
        return [_answer(run, traced[_is_before_1_11(run)]) for run in runs]
    except Exception as error:  # a net's own code may raise anything; the table goes on without it
        return Untraced(name=runs[0].model, why=f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:200]}")


def _has_softmax(traced: Traced) -> bool:
    """Whether the net itself has one: the loss has a log_softmax in any case."""
    return any("_softmax" in name and "_log_softmax" not in name for name in traced.traces[SMALL].names)


def _traced(run: FitRun, batches: Sequence[int], device: Device) -> Traced:
    return trace_batches(lambda batch: trace_loop(loop_of(run, batch), device), list(batches))


def _answer(run: FitRun, traced: Traced) -> FitAnswer:
    from memfit.planner.prediction import footprint_on

    device = card(run.torch)

    def at(batch: int) -> tuple[bool, str, float]:
        footprint = footprint_on(traced.at(batch), device, torch_version=run.torch)
        return footprint.fits, footprint.verdict, footprint.phases["train"].process_bytes / (device.usable_bytes or 1)

    return FitAnswer(
        run=run, net_kind=traced.at(run.ran).net_kind, ran=at(run.ran), failed=at(run.failed) if run.failed else None
    )


def statistics(rows: Sequence[FitAnswer]) -> dict[str, Any]:
    """Shares: of what ran that is said to fit; of what failed that is said not to fit, and of the rest that is close.

    ``clear_wrong``: of the verdicts that are not "close", those that are wrong.
    """
    failed = [row.failed for row in rows if row.failed is not None]
    ran = [row.ran for row in rows]
    clear = [verdict == "no" for _, verdict, _ in ran if verdict != "close"]
    clear += [verdict == "yes" for _, verdict, _ in failed if verdict != "close"]

    def share(flags: Sequence[bool]) -> float | None:
        return sum(flags) / len(flags) if flags else None

    return {
        "rows": len(rows),
        "ran_fits": share([fits for fits, _, _ in ran]),
        "failed_does_not": share([not fits for fits, _, _ in failed]),
        "close": share([fits and verdict == "close" for fits, verdict, _ in failed]),
        "failed_does_not_or_close": share([not fits or verdict == "close" for fits, verdict, _ in failed]),
        "failed_rows": len(failed),
        "ran_said_no": share([verdict == "no" for _, verdict, _ in ran]),
        "clear_wrong": share(clear),
        "clear_verdicts": len(clear),
    }


def sample(runs: Sequence[FitRun], nets: int | None, seed: int) -> list[FitRun]:
    """The rows of so many nets, net by net, so that every first part is a fair sample."""
    order = {name: place for place, name in enumerate(fair_sample({run.model for run in runs}, nets, seed))}
    return sorted((run for run in runs if run.model in order), key=lambda run: order[run.model])
