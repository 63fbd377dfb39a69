"""Runs of every kind, killed, stopped, starved and damaged by chance, and resumed; what has to hold after each launch.

python -m bench.attack --cases 50 [--seed 0] [--kinds plain,ddp] [--out bench/results/attack.json]

Prints its seed; ``--case NUMBER`` with the same seed runs one case again. What has to hold: an exit code of the
contract, no traceback, no "Done" without every window, no process or temporary file left; and at the end the weights
bit for bit, and every sample once, as in a run that was never disturbed. Needs the right to mount a tmpfs for the
cases with full and read-only disks; without it these launches are not disturbed.
"""

from __future__ import annotations

import argparse
import collections
import json
import random
import sys
import tempfile
import time
from pathlib import Path

from bench.result_file import write_result
from tests.attack.attacking import KINDS, Attacker, AttackError, draw_case


def main() -> int:
    """Runs the cases; 1 where an invariant did not hold."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=20)
    parser.add_argument("--seed", type=int, default=None)
    parser.add_argument("--kinds", default=",".join(KINDS))
    parser.add_argument("--case", type=int, default=None)
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    seed = asked.seed if asked.seed is not None else random.SystemRandom().randrange(1 << 32)
    print(f"seed {seed}", flush=True)
    numbers = range(asked.cases) if asked.case is None else [asked.case]
    counts: dict[str, collections.Counter[str]] = {
        "kinds": collections.Counter(),
        "disturbances": collections.Counter(),
    }
    counts["damages"] = collections.Counter()
    failures, begin = [], time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        attacker = Attacker(Path(folder))
        for number in numbers:
            case = draw_case(seed, number, tuple(asked.kinds.split(",")))
            counts["kinds"][case.kind] += 1
            counts["disturbances"].update(launch.disturbance for launch in case.launches)
            counts["damages"].update(launch.damage for launch in case.launches)
            try:
                attacker.attack(case)
            except AttackError as error:
                failures.append({"case": number, "what": str(error)})
                print(f"case {number}: {error}", flush=True)
    result = {
        "cases": len(numbers), "seed": seed, "failed": len(failures), "failures": failures,
        "seconds": round(time.monotonic() - begin, 1), **{name: dict(count) for name, count in counts.items()},
    }  # fmt: skip
    print(json.dumps({key: value for key, value in result.items() if key != "failures"}))
    if asked.out:
        write_result(asked.out, result)
    return int(bool(failures))


if __name__ == "__main__":
    sys.exit(main())
