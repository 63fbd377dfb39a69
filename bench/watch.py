"""What memfit.watch adds to an optimizer step: time inside of its hook, over steps of a net that takes none.

python -m bench.watch [--steps 20000] [--rounds 5] [--json F]
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

import memfit
from bench.result_file import add_json_option, target, write_result


def step_seconds(steps: int, out: Path | None) -> float:
    """Seconds of a step, with the watch where ``out`` is a file."""
    parameter = torch.nn.Parameter(torch.zeros(1))
    parameter.grad = torch.zeros(1)
    optimizer = torch.optim.SGD([parameter], lr=0.0)
    monitor = memfit.watch(optimizer, out=out) if out is not None else None
    begin = time.perf_counter()
    for _ in range(steps):
        optimizer.step()
    seconds = (time.perf_counter() - begin) / steps
    if monitor is not None:
        monitor.close()
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20000)
    parser.add_argument("--rounds", type=int, default=5)
    add_json_option(parser)
    arguments = parser.parse_args()
    added = []
    with tempfile.TemporaryDirectory() as folder:
        for number in range(arguments.rounds):
            watched = step_seconds(arguments.steps, Path(folder) / f"{number}.jsonl")
            added.append((watched - step_seconds(arguments.steps, None)) * 1e6)
    figures = {"steps": arguments.steps, "added_microseconds": added, "median_microseconds": statistics.median(added)}
    print(f"memfit.watch adds {figures['median_microseconds']:.1f} microseconds to a step")
    write_result(target(arguments.json), figures)


if __name__ == "__main__":
    main()
