"""Real memory failures at every point of a run of three windows, and what they cost: counts.

python bench/faults.py [--stride N]

A failure is the allocator's own: RLIMIT_DATA is lowered to what the process has, for one allocation. For each job (nets
with dropout and BatchNorm, two optimizers, two turns; tests/train/faulty.py) and each kind of point, a run with one
failure at each point is compared with the undisturbed run: ids consumed, and weights, buffers, averages and optimizer
state bit for bit. ``twice`` fails again at the same place, so that the window is split: there weights are compared to
rounding, for the net without dropout and batch statistics. Points that a run did not reach are not counted.
"""

import argparse
import contextlib
import sys
import tempfile
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from memfit.errors import Exit
from memfit.train.checkpoints import Checkpoints
from memfit.train.once import TornStepError
from tests.train.faulty import JOBS, run, run_out_of_memory, same

KINDS = ("forward", "backward", "step", "validate", "save", "twice")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--stride", type=int, default=1, help="every n-th point alone")
    stride = parser.parse_args().stride
    print(f"{'job':22} {'failure in':10} {'points':>6} {'done':>6} {'same ids':>8} {'same weights':>12} {'torn':>5}")
    for name, (kind, micro) in JOBS.items():
        for failure in KINDS:
            if failure != "twice" or name == "plain":
                print(f"{name:22} {failure:10} {counts(kind, micro, failure, stride)}", flush=True)


def counts(kind, micro, failure, stride) -> str:
    steps = failure == "step"
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder)
        _, wanted, ids, _, points = run(path / "whole", kind(), micro, steps=steps, every=0)
        point = "forward" if failure == "twice" else failure
        every = 4 if failure == "save" else points.reached[point]
        done = same_ids = same_weights = torn = tried = 0
        for number in range(0, every, stride):
            tried += 1
            fails = {} if failure == "save" else {(point, number): 1}
            if failure == "twice":
                fails[(point, number + number % 3 + 1)] = 1
            saving = failing_save(number) if failure == "save" else contextlib.nullcontext()
            try:
                with saving:
                    code, learnt, found, _, seen = run(
                        path / str(number), kind(), micro, fails, steps, every=0, saves=lambda line: None,
                        say=lambda line: None,
                    )  # fmt: skip
            except TornStepError:
                torn += 1
                continue
            if seen.failed < len(fails):
                tried -= 1
                continue
            done += code == Exit.DONE
            same_ids += consumed(found) == consumed(ids)
            alike = close if failure == "twice" else same
            same_weights += alike(learnt, wanted)
    return f"{tried:6} {done:6} {same_ids:8} {same_weights:12} {torn:5}"


def consumed(samples) -> list[int]:
    return sorted(i for line in samples for i in line["ids"])


def close(one, other) -> bool:
    return all(torch.allclose(one[name], other[name], rtol=1e-5, atol=1e-6) for name in other)


@contextlib.contextmanager
def failing_save(number):
    plain, calls = Checkpoints.write, []

    def write(*arguments, **options):
        calls.append(1)
        if len(calls) == number + 1:
            run_out_of_memory()
        return plain(*arguments, **options)

    Checkpoints.write = write
    try:
        yield
    finally:
        Checkpoints.write = plain


if __name__ == "__main__":
    main()
