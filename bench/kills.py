"""python -m bench.kills [--kills 100] [--seed 0] [--json F]: kill -9 at random moments of a run that saves after every
window, resumed each time; the ends are compared with an undisturbed run's, byte for byte. First with checkpoints that
are written while training waits, then with those that are written while it goes on.
"""

from __future__ import annotations

import argparse
import random
import tempfile
from dataclasses import asdict
from pathlib import Path

from bench.result_file import add_json_option, target, write_result
from testing.kill_and_resume import kill_and_resume, make_plan, server


def main() -> None:
    """Prints the counts; an AssertionError where an end differs or a checkpoint is torn."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    add_json_option(parser)
    asked = parser.parse_args()
    counts = {}
    for writing in ("synchronous", "asynchronous"):
        with tempfile.TemporaryDirectory() as folder, server() as forking:
            plan = make_plan(Path(folder), writing)
            count = kill_and_resume(forking, Path(folder), plan, asked.kills, random.Random(asked.seed))
        counts[writing] = asdict(count)
        print(
            f"{writing}: {count.kills} kills, {count.while_saving} of them with a checkpoint half-written; "
            f"{count.finished} runs ended like the undisturbed one; {count.passed_over} torn checkpoints met; "
            f"{count.repeated} windows trained again",
            flush=True,
        )
    write_result(target(asked.json), {"seed": asked.seed, "writing": counts})


if __name__ == "__main__":
    main()
