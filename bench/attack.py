"""Runs of every kind, killed, stopped, starved and damaged by chance, and resumed; what has to hold after each launch.

python -m bench.attack --cases 110 [--seed 0] [--lanes 2] [--kinds plain,ddp] [--out bench/results/attack.json]

Prints its seed; ``--case NUMBER`` with the same seed runs one case again. What has to hold: an exit code of the
contract, its line last, no traceback, no "Done" without every window, sockets on loopback alone, no process or
temporary file left; and at the end the weights bit for bit, and every sample once, as in a run that was never
disturbed. 110 cases reach every disturbance of every kind. Full disks, disks without inodes and read-only ones are a
tmpfs of 24 MiB, which takes the right to mount; without it these launches are not disturbed. Slow disks and clock
steps are injected into Python's ``os.fsync`` and ``time.time`` of the training process.
"""

from __future__ import annotations

import argparse
import collections
import json
import math
import queue
import random
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from bench.result_file import write_result
from testing.attacker import KINDS, Attacker, AttackError, Case, draw_case
from testing.small_disk import CannotMountError

NOT_RUN = "not run"


def main() -> int:
    """Runs the cases; 1 where an invariant did not hold."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=20)
    parser.add_argument("--seed", type=int, default=None)
    parser.add_argument("--kinds", default=",".join(KINDS))
    parser.add_argument("--first", type=int, default=0, help="number of the first case")
    parser.add_argument("--case", type=int, default=None)
    parser.add_argument("--lanes", type=int, default=1, help="cases that run at the same time")
    parser.add_argument("--minutes", type=float, default=math.inf, help="after these no further case begins")
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    seed = asked.seed if asked.seed is not None else random.SystemRandom().randrange(1 << 32)
    print(f"seed {seed}", flush=True)
    numbers = range(asked.first, asked.first + asked.cases) if asked.case is None else [asked.case]
    counts: dict[str, collections.Counter[str]] = {
        name: collections.Counter() for name in ("kinds", "disturbances", "damages", "combinations")
    }
    failures, begin = [], time.monotonic()
    cases = [draw_case(seed, number, tuple(asked.kinds.split(","))) for number in numbers]
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(asked.lanes) as pool:
        attackers: queue.SimpleQueue[Attacker] = queue.SimpleQueue()
        for lane in range(asked.lanes):
            attackers.put(Attacker(Path(folder) / f"lane-{lane}"))

        def attack(case: Case) -> str | None:
            late = time.monotonic() - begin > 60 * asked.minutes
            return NOT_RUN if late else broken(attackers, case)

        for case, what in zip(cases, pool.map(attack, cases), strict=True):
            if what == NOT_RUN:
                continue
            print(f"case {case.number}: {case.kind}: {what or 'held'}", flush=True)
            counts["kinds"][case.kind] += 1
            for launch in case.launches:
                counts["disturbances"][launch.disturbance] += 1
                counts["damages"][launch.damage] += 1
                counts["combinations"][f"{case.kind}, {launch.disturbance}"] += 1
            if what is not None:
                failures.append({"case": case.number, "what": what})
    result = {
        "cases": counts["kinds"].total(), "seed": seed, "failed": len(failures), "failures": failures,
        "seconds": round(time.monotonic() - begin, 1), **{name: dict(count) for name, count in counts.items()},
    }  # fmt: skip
    print(json.dumps({key: value for key, value in result.items() if key != "failures"}))
    if asked.out:
        write_result(asked.out, result)
    return int(bool(failures))


def broken(attackers: queue.SimpleQueue[Attacker], case: Case) -> str | None:
    """What did not hold in a case; None: everything held."""
    attacker = attackers.get()
    try:
        attacker.attack(case)
    except AttackError as error:
        return str(error)
    except CannotMountError as error:
        print(f"case {case.number}: not run: {error}", flush=True)
        return NOT_RUN
    finally:
        attackers.put(attacker)
    return None


if __name__ == "__main__":
    sys.exit(main())
