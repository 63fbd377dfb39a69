"""python bench/kills.py [--kills 100] [--writing asynchronous|synchronous] [--seed 0]: kill -9 at random moments of a
run that saves after every window, resumed each time; the ends compared with an undisturbed run's, byte for byte.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.train.killing import kill_and_resume, make_plan, server


def main() -> None:
    """Prints the counts; an AssertionError where an end differs or a checkpoint is torn."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--writing", choices=["asynchronous", "synchronous"], default="asynchronous")
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, server() as one:
        plan = make_plan(Path(folder), asked.writing)
        count = kill_and_resume(one, Path(folder), plan, asked.kills, random.Random(asked.seed))
    print(
        f"{asked.writing}: {count.kills} kills, {count.while_saving} of them with a checkpoint half-written; "
        f"{count.finished} runs ended like the undisturbed one; {count.passed_over} torn checkpoints met; "
        f"{count.repeated} windows trained again"
    )


if __name__ == "__main__":
    main()
