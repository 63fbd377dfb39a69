"""Checkpoint selection, really run on this CPU: peaks by allocator events, time beside all-or-nothing checkpointing.

python -m bench.planner [--nets dit,unet,decoder] [--rounds 3] [--set dit.depth=6] [--compiled] [--json F]

Budgets are parts of the unlimited activation bytes: the measured peak of a forward and backward that keeps everything,
over parameters and gradients. Where a measured peak is over its prediction, the difference is taken off the budget and
the selection is made once more. Times are medians of interleaved rounds
(on one thread, of the process's own work, which others hardly disturb); the ratio is to every block recomputed.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from bench.result_file import add_json_option, target, write_result
from memfit.apply.checkpointing import recompute
from memfit.device.hardware.benchmarks import AllocatorEvents
from memfit.device.hardware.catalogue import find_device
from memfit.job import Nets, Shape
from memfit.planner.search.traced_job import open_traced_job
from memfit.trace.durations import now
from memfit.trace.session import MicroTrace
from memfit.trace.step import Tracing
from testing.large_nets import Decoder, Dit, Plain, UNet

JOBS: dict[str, tuple[type[Plain], int]] = {"dit": (Dit, 2), "unet": (UNet, 4), "decoder": (Decoder, 4)}
"""Net -> job, and samples of its micro-batch."""
BUDGETS = (75, 50, 25)
MOST = {75: 0.85, 50: 0.88, 25: 1.0}
"""Of a budget in percent: the time over all-or-nothing that it may take."""
MIB = 1 << 20


def main() -> int:
    """Prints a table for each net; 1 where a bound is not held."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nets", default=",".join(JOBS), help="which of dit, unet, decoder")
    parser.add_argument("--rounds", type=int, default=3, help="interleaved rounds of real steps")
    parser.add_argument("--set", dest="pairs", action="append", default=[], help="a setting, as dit.depth=6")
    parser.add_argument("--compiled", action="store_true", help="also torch's activation_memory_budget, compiled")
    add_json_option(parser)
    asked = parser.parse_args()
    figures = {}
    for name in asked.nets.split(","):
        settings = dict(pair.removeprefix(f"{name}.").split("=", 1) for pair in asked.pairs if pair.startswith(name))
        kind, items = JOBS[name]
        figures[name] = bench(name, kind(**settings), Shape(items=items), asked.rounds, asked.compiled)
    complete = list(figures) == list(JOBS)
    write_result(target(asked.json, complete=complete), {"nets": figures}, packages=["diffusers"])
    return int(any(row.get("over") for rows in figures.values() for row in rows))


def bench(name: str, job: Plain, shape: Shape, rounds: int, compiled: bool) -> list[dict[str, Any]]:
    """One net's rows: everything kept, the budgets, every block recomputed."""
    torch.manual_seed(0)
    nets = job.nets()
    resident = 2 * sum(p.numel() * p.itemsize for net in nets.values() for p in net.parameters())
    unlimited = measured(job, nets, shape, {})
    budgets = {percent: resident + (unlimited - resident) * percent // 100 for percent in BUDGETS}
    begin = time.perf_counter()
    every, predicted = extremes(job, shape)
    chosen = select(job, shape, budgets)
    took = time.perf_counter() - begin
    rows = [_row("all kept", {}, 0, predicted[0], unlimited, resident)]
    for percent in chosen:
        rows.append(within(job, nets, shape, budgets[percent], percent, resident, *chosen[percent]))
    rows.append(_row("all recomputed", every, 0, predicted[1], measured(job, nets, shape, every), resident))
    times: list[list[float]] = [[] for _ in rows]
    for _ in range(rounds):
        for row, seen in zip(rows, times, strict=True):
            seen.append(seconds(job, nets, [shape], row["modes"]))
    print(
        f"\n{name}: {(unlimited - resident) / MIB:.1f} MiB of activations, {len(every)} blocks; chosen in {took:.0f} s"
    )
    print(f"{'':22}{'% bytes':>8}{'predicted':>10}{'measured':>10}{'/ kept':>8}{'/ recomputed':>13}  corrections")
    for row, seen in zip(rows, times, strict=True):
        row["seconds"] = statistics.median(seen)
        kept = statistics.median([a / b for a, b in zip(seen, times[0], strict=True)])
        row["ratio"] = statistics.median([a / b for a, b in zip(seen, times[-1], strict=True)])
        row["over"] = row["measured"] > row["predicted"] or (
            row["percent"] > 0 and (row["measured"] > row["budget"] or row["ratio"] > MOST[row["percent"]])
        )
        print(
            f"{row['name']:22}{100 * (row['measured'] - resident) / (unlimited - resident):8.1f}"
            f"{(row['predicted'] - resident) / MIB:10.1f}{(row['measured'] - resident) / MIB:10.1f}"
            f"{kept:8.3f}{row['ratio']:13.3f}  {row.get('corrections', '')}" + ("  OVER" if row["over"] else "")
        )
    if compiled:
        rows += [_compiled(job, nets, shape, part, resident, unlimited) for part in (0.75, 0.5, 0.25)]
    return rows


def extremes(job: Plain, shape: Shape, *, accumulated: bool = True) -> tuple[dict[str, str], tuple[int, int]]:
    """(every block recomputed; predicted bytes with everything kept and with everything recomputed)."""
    with open_traced_job(job, Tracing(device=find_device("cpu")), shape) as fitting:
        every = dict.fromkeys(fitting.blocks(shape, accumulated=accumulated), "full")
        kept, recomputed = (peak_of(fitting.trace(shape, modes, accumulated=accumulated)) for modes in ({}, every))
    return every, (kept, recomputed)


def select(job: Plain, shape: Shape, budgets: Mapping[int, int]) -> dict[int, tuple[dict[str, str], int]]:
    """The modes chosen for each budget, and the bytes predicted."""
    by_percent = {}
    with open_traced_job(job, Tracing(device=find_device("cpu")), shape) as fitting:
        for percent, budget in budgets.items():
            chosen = fitting.select(shape, budget, peak_of, accumulated=True)
            if chosen is None:
                lowest = fitting.lowest(shape, peak_of, accumulated=True).peak
                print(f"{percent} %: {budget} bytes are under the floor of {lowest}")
                continue
            by_percent[percent] = (dict(chosen.modes), chosen.peak)
    return by_percent


def within(
    job: Plain, nets: Nets, shape: Shape, budget: int, percent: int, resident: int, modes: dict[str, str], peak: int
) -> dict[str, Any]:
    """The selection for a budget; corrected once by the measurement, where that is above the prediction."""
    seen, corrections = measured(job, nets, shape, modes), 0
    if seen > peak:
        short, corrections = seen - peak, 1
        modes, peak = select(job, shape, {percent: budget - short})[percent]
        peak += short
        seen = measured(job, nets, shape, modes)
    row = _row(f"{percent} %", modes, budget, peak, seen, resident)
    return row | {"percent": percent, "corrections": corrections}


def _row(name: str, modes: Mapping[str, str], budget: int, predicted: int, seen: int, resident: int) -> dict[str, Any]:
    return {
        "name": name, "modes": dict(modes), "budget": budget, "predicted": predicted, "measured": seen,
        "resident": resident, "percent": 0,
    }  # fmt: skip


def peak_of(micro_trace: MicroTrace) -> int:
    """Highest live bytes of a traced micro-batch."""
    trace = micro_trace.trace
    return int(np.cumsum(trace.kind.astype(np.int64) * trace.nbytes[trace.storage]).max())


def measured(job: Plain, nets: Nets, shape: Shape, modes: Mapping[str, str]) -> int:
    """Bytes by the allocator's events, parameters and gradients with them."""
    gc.collect()
    gc.disable()
    parameters = [p for net in nets.values() for p in net.parameters()]
    buffers = [b for net in nets.values() for b in net.buffers()]
    try:
        with AllocatorEvents(base=sum(t.numel() * t.itemsize for t in (*parameters, *buffers))) as events:
            for p in parameters:
                p.grad = torch.empty_like(p)
            with events.phase("step"):
                _step(job, nets, shape, modes)
    finally:
        gc.enable()
        for p in parameters:
            p.grad = None
    return events.peaks()["step"].allocated_bytes


def seconds(
    job: Plain, nets: Nets, shapes: Sequence[Shape], modes: Mapping[str, str], *, accumulated: bool = True
) -> float:
    """Of a forward and backward of each; ``accumulated``: into gradients that are there from the start."""
    for net in nets.values():
        for p in net.parameters():
            p.grad = torch.zeros_like(p) if accumulated else None
    begin = now()
    for shape in shapes:
        _step(job, nets, shape, modes)
    return now() - begin


def _step(job: Plain, nets: Nets, shape: Shape, modes: Mapping[str, str]) -> None:
    batch = job.batch(shape)
    with recompute(nets, modes):
        total, units = job.loss(nets, batch)
        (total / units).backward()


def _compiled(job: Plain, nets: Nets, shape: Shape, part: float, resident: int, unlimited: int) -> dict[str, Any]:
    """torch.compile with this activation_memory_budget: its measured peak and its time."""
    import torch._functorch.config as functorch

    torch._dynamo.reset()
    (net,) = nets.values()
    forward = net.forward
    try:
        with functorch.patch(activation_memory_budget=part):
            net.forward = torch.compile(forward)  # type: ignore[method-assign]
            measured(job, nets, shape, {})
            seen = measured(job, nets, shape, {})
            took = statistics.median(seconds(job, nets, [shape], {}) for _ in range(2))
    finally:
        del net.forward
    activations = unlimited - resident
    print(
        f"{f'compiled, budget {part}':22}{100 * (seen - resident) / activations:8.1f}{'':10}"
        f"{(seen - resident) / MIB:10.1f}"
        f"  {took:.2f} s"
    )
    return {"name": f"compiled {part}", "measured": seen, "resident": resident, "seconds": took}


if __name__ == "__main__":
    sys.exit(main())
