"""Accumulation against recompute at equal bytes and global batch, really run on this CPU, and what the plan picks.

python -m bench.accumulation [--rounds 5] [--cases 300x1,64x1,16x4,16x1] [--set depth=18] [--json F]

A window of 4b clips of so many frames on the DiT, in two ways: four micro-batches of b that keep everything, or one of
4b whose blocks all recompute. The budget holds either; within it ``memfit plan`` chooses freely, by this machine's own
times, and its window is run beside them. Times are medians of interleaved rounds of the process's own work.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from bench.planner import extremes, seconds
from bench.result_file import add_json_option, target, write_result
from memfit.device.hardware.catalogue import find_device, with_memory
from memfit.geometry import split
from memfit.job import Shape
from memfit.planner.cpu_margin import HOST_MARGIN, HOST_MARGIN_BYTES
from memfit.planner.request import PlanRequest
from memfit.planner.search.search import find_plan
from testing.large_nets import Dit

PARTS = 4
SLACK = 1.05
"""Times the faster way that the plan's window may take: two of one kind differ by so much here."""


def main() -> int:
    """Prints a line for each case; 1 where the plan's window is slower than the faster way."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", default="300x1,64x1,16x4,16x1", help="frames x clips of a micro-batch")
    parser.add_argument("--rounds", type=int, default=5, help="interleaved rounds of real windows")
    parser.add_argument("--set", dest="pairs", action="append", default=[], help="a setting of the DiT, as depth=6")
    add_json_option(parser)
    asked = parser.parse_args()
    settings = dict(pair.split("=", 1) for pair in asked.pairs)
    print(
        f"{'frames x clips':16}{'estimated':>10}{'measured':>10}{'plan':>24}{'/ faster':>10}   accumulation / recompute"
    )
    rows = []
    for case in asked.cases.split(","):
        frames, clips = map(int, case.split("x"))
        rows.append(compare(Dit(frames=frames, **settings), clips, asked.rounds))
        print(
            f"{case:16}{rows[-1]['estimated']:10.2f}{rows[-1]['measured']:10.2f}{rows[-1]['plan']:>24}"
            f"{rows[-1]['plan_over_faster']:10.2f}" + ("" if rows[-1]["ok"] else "  SLOWER"),
            flush=True,
        )
    write_result(target(asked.json), {"cases": rows})
    return int(not all(row["ok"] for row in rows))


def compare(job: Dit, clips: int, rounds: int) -> dict[str, Any]:
    """The two ways and the plan's own, estimated and measured."""
    shape, window_shape = Shape(items=clips), Shape(items=PARTS * clips)
    every, (small, _) = extremes(job, shape)
    large = extremes(job, window_shape, accumulated=False)[1][1]
    budget = int((max(small, large) + HOST_MARGIN_BYTES) / (1 - HOST_MARGIN)) + (1 << 20)
    answer = find_plan(
        job,
        PlanRequest(
            name="testing/large_nets.py:Dit",
            global_batch=window_shape.items,
            device=with_memory(find_device("cpu"), budget),
        ),
    )
    plan = answer.plan
    assert plan is not None
    roomy = with_memory(find_device("cpu"), 1 << 40)
    request = PlanRequest(name="dit", global_batch=window_shape.items, device=roomy)
    recomputing = type(job)(**{**job.settings(), "checkpoint": "all"})
    fixed = {
        "accumulated": find_plan(job, replace(request, micro_batch=clips)),
        "recomputed": find_plan(recomputing, replace(request, micro_batch=window_shape.items, keep=("checkpointing",))),
    }
    estimated = {name: answer_of.floor.seconds or 0.0 for name, answer_of in fixed.items()}
    torch.manual_seed(0)
    nets = job.nets()
    ways: dict[str, tuple[list[int], dict[str, str]]] = {
        "accumulated": ([clips] * PARTS, {}),
        "recomputed": ([window_shape.items], every),
        "plan": (plan.micro_batches[0], plan.checkpointing),
    }
    assert plan.micro_batches == [list(r) for r in split(window_shape.items, plan.micro_batch, job.unit).micro_batches]
    times: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(rounds):
        for name, (micro_batches, modes) in ways.items():
            shapes = [Shape(items=items) for items in micro_batches]
            times[name].append(seconds(job, nets, shapes, modes, accumulated=False))
    medians = {name: statistics.median(seen) for name, seen in times.items()}
    faster = min(("accumulated", "recomputed"), key=medians.__getitem__)
    over = float(statistics.median(np.array(times["plan"]) / np.array(times[faster])))
    measured = float(statistics.median(np.array(times["accumulated"]) / np.array(times["recomputed"])))
    guess = estimated["accumulated"] / estimated["recomputed"]
    picks = (guess < 1) == (measured < 1) or abs(measured - 1) < SLACK - 1
    modes = [mode for mode in plan.checkpointing.values() if mode != "keep"]
    return {
        "frames": job.frames, "clips": clips, "depth": job.depth, "budget": budget,
        "estimated": guess, "measured": measured, "picks_the_faster": picks,
        "estimated_seconds": {**estimated, "plan": plan.step_seconds}, "measured_seconds": medians,
        "plan": f"{plan.arithmetic.split(' on ')[0]}, {len(modes)} modules", "plan_over_faster": over,
        "ok": picks and over <= SLACK,
    }  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
