"""Real memory failures at every point of a run of three windows, and what they cost: counts.

python -m bench.faults [--stride N] [--json F]

A failure is the allocator's own: RLIMIT_DATA is lowered to what the process has, for one allocation. For each job (nets
with dropout and BatchNorm, two optimizers, two turns; testing/faulty_jobs.py) and each kind of point, a run with one
failure at each point is compared with the undisturbed run: ids consumed, and weights, buffers, averages and optimizer
state bit for bit. ``twice`` fails again at the same place, so that the window is split: there weights are compared to
rounding, for the net without dropout and batch statistics. Every failure is
checked to have happened.
"""

import argparse
import contextlib
import gc
import sys
import tempfile
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from bench.result_file import add_json_option, target, write_result
from memfit.errors import Exit
from memfit.train.checkpoint.checkpoints import Checkpoints
from memfit.train.recovery.exactly_once import TornStepError
from testing.faulty_jobs import JOBS, Spoiled, run, same

KINDS = ("forward", "backward", "step", "validate", "save", "twice")


def main() -> None:
    """Prints a line for each job and kind of failure, and writes them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stride", type=int, default=1, help="only every n-th point")
    add_json_option(parser)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    gc.freeze()  # each failure collects garbage: what was imported is none
    print(f"{'job':22} {'failure in':10} {'points':>6} {'done':>6} {'same ids':>8} {'same weights':>12} {'torn':>5}")
    rows = []
    for name, (kind, micro) in JOBS.items():
        for failure in KINDS:
            if failure != "twice" or name == "plain":
                row = {"job": name, "failure": failure, **counts(kind, micro, failure, asked.stride)}
                rows.append(row)
                print(
                    f"{name:22} {failure:10} {row['points']:6} {row['done']:6} {row['same_ids']:8} "
                    f"{row['same_weights']:12} {row['torn']:5}",
                    flush=True,
                )
    totals = {key: sum(row[key] for row in rows) for key in ("points", "done", "same_ids", "same_weights", "torn")}
    write_result(target(asked.json), {"stride": asked.stride, "rows": rows, "total": totals})


def counts(kind, micro, failure, stride) -> dict[str, int]:
    """Runs with one failure at each point: how many there were, ended, and learned the same from the same samples."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder)
        _, wanted, ids, points = disturbed(path / "whole", kind, micro, failure, {})
        point = "forward" if failure == "twice" else failure
        done = same_ids = same_weights = torn = 0
        numbers = range(0, points.reached[point], stride)
        for number in numbers:
            fails = {(point, number): 1}
            if failure == "twice":
                fails[point, number + number % 3 + 1] = 1
            try:
                code, learnt, consumed_ids, seen = disturbed(path / str(number), kind, micro, failure, fails)
            except TornStepError:
                torn += 1
                continue
            assert seen.failed == len(fails), f"{seen.failed} of {len(fails)} failures at {failure} {number}"
            done += code == Exit.DONE
            same_ids += consumed(consumed_ids) == consumed(ids)
            alike = close if failure == "twice" else same
            same_weights += alike(learnt, wanted)
    return {
        "points": len(numbers), "done": done, "same_ids": same_ids, "same_weights": same_weights, "torn": torn,
    }  # fmt: skip


def disturbed(path, kind, micro, failure, fails):
    """(exit code, what was learnt, ids, points) of a run with these failures."""
    said = []
    with spoiled_saves():
        code, learnt, ids, _, points = run(
            path, kind(), micro, fails, failure == "step", every=0, saves=said.append, say=said.append
        )
    if code != Exit.DONE:
        print(f"{failure} {fails}: {code!r}, {said}", file=sys.stderr)
    return code, learnt, ids, points


def consumed(samples) -> list[int]:
    return sorted(i for line in samples for i in line["ids"])


def close(learnt, other) -> bool:
    return all(torch.allclose(learnt[name], other[name], rtol=1e-5, atol=1e-6) for name in other)


@contextlib.contextmanager
def spoiled_saves():
    """A point at every write of a checkpoint."""
    plain = Checkpoints.write

    def write(*arguments, **options):
        Spoiled.points("save")
        return plain(*arguments, **options)

    Checkpoints.write = write
    try:
        yield
    finally:
        Checkpoints.write = plain


if __name__ == "__main__":
    main()
