"""xMem's runs: NVML's bytes of a training loop above a CUDA context, with four published estimates of each, and those
of ``estimators``.

Table: ``card,model,optimizer,batch,seq_or_image,zero_grad,measured_peak_bytes,oom,est_xmem,…``. What is measured is
the highest reading minus the first one, which already has the context: the allocator's segments, and the kernels and
handles that libraries load afterwards. Runs that ended in an out-of-memory error count for verdicts alone.

Of convolution nets the first reading may have some of the weights too. The trainer starts the thread that reads NVML
and copies the net to the card at once; the thread first imports its modules, starts NVML and waits for two readings
(exp/trainer/plugins/monitor/runner.py, ``_HostMetrics``). How many weights are on the card then is not known: the
prediction takes half of them, its interval from none to all. Before a net for text is copied the trainer waits 2 s.
"""

from __future__ import annotations

import csv
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from bench.accuracy_parts import environments, estimators
from bench.accuracy_parts.loop import Loop, trace_loop
from bench.accuracy_parts.timm_fits import Untraced
from bench.accuracy_parts.workers import each
from memfit.device.hardware.catalogue import Device, find_device
from memfit.events import CATEGORIES, Trace

PUBLISHED = {"xmem": "est_xmem", "dnnmem": "est_dnnmem", "schedtune": "est_schedtune", "llmem": "est_llmem"}
MIB = 1 << 20
TORCH = "2.6.0"
"""Of the image that the runs were made in."""
ITERATIONS = 4
"""After which the trainer stops."""
LOADED_LATER = (0, 30 * MIB, 250 * MIB)
"""(low, usual, high) that kernels and handles of libraries take after the context is made.

Source of the usual: highwaterlabs/torch-preflight on three T4 with torch 2.10 and 2.11: 105 MiB after the context, 131
after the first product (cuBLAS), 135 after the first convolution (cuDNN). Larger cards and libraries: up to 250 MB.
"""


@dataclass(frozen=True, kw_only=True)
class XmemRun:
    """A row of the table; bytes."""

    card: str
    model: str
    optimizer: str
    batch: int
    zero_grad: str
    is_first_generation: bool
    measured: int
    oom: bool
    estimates: dict[str, float]
    outside_docker: bool
    is_image: bool


@dataclass(frozen=True, kw_only=True)
class XmemAnswer:
    """A row with what is predicted for it, in bytes above the context."""

    run: XmemRun
    net_kind: str
    predicted: int
    low: int
    high: int
    fits: bool
    verdict: str
    copied_early: int = 0
    """Bytes of weights that ``predicted`` leaves out, since the first reading may have them."""
    others: dict[str, int] = field(default_factory=dict)
    """Bytes by estimator that is no published one."""

    @property
    def error(self) -> float:
        """(predicted - measured) / measured."""
        return self.predicted / self.run.measured - 1

    @property
    def estimates(self) -> dict[str, float]:
        """Bytes by estimator."""
        return {**self.run.estimates, **self.others}

    @property
    def error_from_empty(self) -> float:
        """The same if the first reading had no weights."""
        return (self.predicted + self.copied_early) / self.run.measured - 1


def read(path: Path) -> list[XmemRun]:
    """The table's rows."""
    with path.open(newline="") as file:
        return [_run(row) for row in csv.DictReader(file)]


def _run(row: dict[str, str]) -> XmemRun:
    recorded = row["zero_grad"].startswith("mode")
    modes = {"0": "start", "1": "before_backward", "2": "after_step"}
    return XmemRun(
        card=row["card"], model=row["model"], optimizer=row["optimizer"], batch=int(row["batch"]),
        zero_grad=modes[row["zero_grad"].split()[1].rstrip("=:,")[0]] if recorded else "start",
        is_first_generation=not recorded, measured=int(row["measured_peak_bytes"]), oom=row["oom"] not in ("0", ""),
        estimates={name: float(row[column]) for name, column in PUBLISHED.items()
                   if row.get(column) and float(row[column]) > 0},
        outside_docker="CoLab" in row.get("notes", "") or "CoLab" in row.get("path", ""),
        is_image="x" in row["seq_or_image"].split(",")[0] and row["seq_or_image"][0].isdigit(),
    )  # fmt: skip


def loop_of(run: XmemRun) -> Loop:
    """The loop of xMem's trainer."""
    if run.is_image:
        return Loop(
            net=run.model, kind="torchvision", environment="torchvision-0.21", batch=run.batch, image=86,
            optimizer=run.optimizer, zero_grad=run.zero_grad, reads_prediction=True,
            cublas_workspace=not run.is_first_generation, iterations=ITERATIONS,
        )  # fmt: skip
    seq2seq = "t5" in run.model.lower()
    return Loop(
        net=run.model, kind="seq2seq-lm" if seq2seq else "causal-lm", environment="transformers-4.51.3",
        batch=run.batch, length=128, optimizer=run.optimizer, zero_grad=run.zero_grad, attention_mask=True,
        attention_mask_padded=True, cublas_workspace=not run.is_first_generation or run.outside_docker,
        iterations=ITERATIONS,
    )  # fmt: skip


def card(name: str) -> Device:
    """The catalogue's card of a name that a driver gives, as the readings see it.

    The context is in the first reading and so in none of the differences, but it is not free either: what remains of
    the card is less by it. What is loaded after it is in them.
    """
    plain = name.lower().replace("nvidia", "").replace("geforce", "").strip()
    device = find_device({"a100-sxm4-40gb": "a100-40gb", "a100-sxm4-80gb": "a100-80gb"}.get(plain, plain))
    low, usual, high = LOADED_LATER
    usable = (device.usable_bytes or 0) - (device.context_bytes or 0) + usual
    return replace(device, context_low=low, context_bytes=usual, context_high=high, usable_bytes=usable)


def answers(runs: Sequence[XmemRun], workers: int) -> Iterator[XmemAnswer | Untraced]:
    """Predictions as they come; libraries of different environments never meet in one process."""
    for environment in sorted({loop_of(run).environment for run in runs}):
        environments.install(environment)
        yield from each(_answer, [run for run in runs if loop_of(run).environment == environment], workers)


def _answer(run: XmemRun) -> XmemAnswer | Untraced:
    loop = loop_of(run)
    environments.enter(loop.environment)
    import torch

    from memfit.planner.prediction import footprint_on

    torch.set_num_threads(1)
    try:
        device = card(run.card)
        trace = trace_loop(loop, device)
        footprint = footprint_on(trace, device, torch_version=TORCH)
    except Exception as error:  # a net's own code may raise anything; the table goes on without it
        return Untraced(name=run.model, why=f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:200]}")
    train = footprint.phases["train"]
    weights = weight_bytes(trace) if run.is_image else 0
    return XmemAnswer(
        run=run, net_kind=trace.net_kind, predicted=train.process_bytes - weights // 2,
        low=train.process_bytes_low - weights, high=train.process_bytes_high, fits=footprint.fits,
        verdict=footprint.verdict, copied_early=weights // 2,
        others=estimators.by_parameters(trace, loop) | estimators.by_mem_tracker(loop),
    )  # fmt: skip


def weight_bytes(trace: Trace) -> int:
    """Bytes of a net's parameters and buffers."""
    of_net = [CATEGORIES.index(name) for name in ("parameters", "frozen", "buffers")]
    return int(trace.nbytes[np.isin(trace.category, of_net)].sum())


def statistics(rows: Sequence[XmemAnswer]) -> dict[str, Any]:
    """Errors of the runs that ran, beside each estimator's on the same runs."""
    ran = [row for row in rows if not row.run.oom]
    if not ran:
        return {"rows": 0}
    answer: dict[str, Any] = {"rows": len(ran)}
    sizes = np.abs([row.error for row in ran])
    answer |= {"memfit_median": float(np.median(sizes)), "memfit_p90": float(np.percentile(sizes, 90))}
    from_empty = np.abs([row.error_from_empty for row in ran])
    answer["memfit_median_from_empty"] = float(np.median(from_empty))
    answer["memfit_p90_from_empty"] = float(np.percentile(from_empty, 90))
    for name in (*PUBLISHED, *estimators.ESTIMATORS):
        others = [abs(row.estimates[name] / row.run.measured - 1) for row in ran if name in row.estimates]
        answer[f"{name}_rows"] = len(others)
        answer[f"{name}_median"] = float(np.median(others)) if others else None
        answer[f"{name}_p90"] = float(np.percentile(others, 90)) if others else None
    answer["coverage"] = sum(row.low <= row.run.measured <= row.high for row in ran) / len(ran)
    answer["worst_under"] = float(max(0.0, *(-row.error for row in ran)))
    failed = [row for row in rows if row.run.oom]
    answer["failed_rows"] = len(failed)
    answer["failed_said_not_to_fit"] = sum(not row.fits for row in failed) / len(failed) if failed else None
    return answer
