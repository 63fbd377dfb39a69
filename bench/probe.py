"""The largest batch that really runs under RLIMIT_DATA: what finds it, in how many real steps, and what it finds.

python -m bench.probe [--memory 1GiB] [--json F]

The case is of the kind that other finders were measured on (a true maximum of 62 samples within 1 GiB): eight
Linear + GELU layers, AdamW. Lightning's finders gave 32 (power) and 57 (binsearch) there, Accelerate's 57 or 58.
Doubling and bisection by real trials is run too, as the truth, with the same trials.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from typing import Any

import torch
from torch import nn

import memfit
from bench.result_file import add_json_option, target, write_result
from memfit.sizes import parse_size
from memfit.train.probe.trial import Question, run_trial

WIDTH, LENGTH, LAYERS = 256, 793, 8


class Layers(memfit.Job):
    """A stack whose activations grow by 16 MiB a sample."""

    def nets(self):
        layers = [module for _ in range(LAYERS) for module in (nn.Linear(WIDTH, WIDTH), nn.GELU())]
        return {"net": nn.Sequential(*layers)}

    def optimizers(self, nets):
        return {"net": torch.optim.AdamW(nets["net"].parameters())}

    def batch(self, shape):
        return torch.randn(shape.items, LENGTH, WIDTH)

    def loss(self, nets, batch):
        return memfit.Loss(nets["net"](batch).square().mean((1, 2)).sum(), len(batch))


def by_doubling(budget: int) -> tuple[int, int, int]:
    """(largest that ran, trials, failures): doubling until a failure, then bisection."""
    ran: dict[int, bool] = {}

    def runs(items: int) -> bool:
        question = Question(job=f"{__file__}:Layers", settings={}, items=items, length=None, budget_bytes=budget)
        ran[items] = run_trial(question).ok
        return ran[items]

    low, high = 0, 1
    while runs(high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if runs(middle) else (low, middle)
    return low, len(ran), sum(not ok for ok in ran.values())


def main() -> None:
    """Runs memfit probe and the plain search, and writes what both found."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--memory", default="1GiB")
    add_json_option(parser)
    parser.add_argument("--only-memfit", action="store_true", help="Leaves the plain search out.")
    options = parser.parse_args()
    results: dict[str, Any] = {}
    for name, flags in (("probe", []), ("probe --prove", ["--prove"])):
        command = [sys.executable, "-m", "memfit", "probe", f"{__file__}:Layers", "--memory", options.memory]
        done = subprocess.run([*command, "--json", *flags], capture_output=True, text=True, check=True)
        answer = json.loads(done.stdout)
        results[name] = {
            "found": answer["found"],
            "trials": len(answer["trials"]),
            "failures": sum(not trial["ok"] for trial in answer["trials"]),
            "proved": answer["proved"],
            "relative_error": answer["relative_error"],
            "seconds": round(answer["seconds"], 1),
        }
        print(name, results[name])
    if not options.only_memfit:
        begin = time.perf_counter()
        largest, trials, failures = by_doubling(parse_size(options.memory))
        seconds = round(time.perf_counter() - begin, 1)
        results["doubling and bisection"] = {
            "found": largest, "trials": trials, "failures": failures, "seconds": seconds,
        }  # fmt: skip
        print("doubling and bisection", results["doubling and bisection"])
    write_result(target(options.json), {"memory": options.memory, **results})


if __name__ == "__main__":
    main()
