"""How long it takes to predict one rank of a thousand.

python -m bench.thousand_ranks [--job f5_tts/base] [--world 1024] [--json F]

Processor time is what a machine that does nothing else takes; ``wall_seconds`` is by the clock, whatever else ran.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time

from bench.result_file import add_json_option, target, timed_environment, write_result

MOST_SECONDS = 60
"""Processor time that a prediction may take."""


def main() -> int:
    """1 where it takes longer than MOST_SECONDS of the processor's time."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--job", default="f5_tts/base")
    parser.add_argument("--world", default="1024", help="number of ranks (FSDP2)")
    add_json_option(parser)
    asked = parser.parse_args()
    arguments = ["predict", asked.job, "--world", asked.world, "--engine", "fsdp2", "--device", "a100-80gb", "--json"]
    begin = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-m", "memfit", *arguments],
        env=timed_environment(),
        capture_output=True,
        text=True,
        check=True,
    )
    wall = time.perf_counter() - begin
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    train = json.loads(done.stdout)["phases"]["train"]
    figures = {
        "predicted": "memfit " + " ".join(arguments),
        "processor_seconds": round(used.ru_utime + used.ru_stime, 1),
        "wall_seconds": round(wall, 1),
        "allocated_bytes": train["allocated_bytes"],
        "categories": {name: nbytes for name, nbytes in train["categories"].items() if nbytes},
    }
    print(json.dumps(figures, indent=1))
    write_result(target(asked.json), figures)
    return int(figures["processor_seconds"] > MOST_SECONDS)


if __name__ == "__main__":
    sys.exit(main())
