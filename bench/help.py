"""How long ``memfit --help`` takes: the median of several starts, beside an empty Python's.

python -m bench.help
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import time

STARTS = 11
LIMIT = 0.5
"""Seconds that --help may take."""


def seconds(*arguments: str) -> float:
    """Median wall time of starting Python with these arguments."""
    times = []
    for _ in range(STARTS):
        begin = time.perf_counter()
        subprocess.run([sys.executable, *arguments], check=True, capture_output=True)
        times.append(time.perf_counter() - begin)
    return statistics.median(times)


def main() -> int:
    """Prints a line for each help; 1 where one is over the limit."""
    print(f"python -c pass               {seconds('-c', 'pass'):.3f} s")
    over = False
    for verb in ("", "devices", "predict", "plan", "run"):
        arguments = ["-m", "memfit", *verb.split(), "--help"]
        took = seconds(*arguments)
        over |= took > LIMIT
        print(f"memfit {' '.join(arguments[2:]):<21} {took:.3f} s")
    return int(over)


if __name__ == "__main__":
    sys.exit(main())
