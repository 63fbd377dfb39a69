"""Processor time and memory of ``memfit predict`` for every built-in job and version of one.

python bench/variants.py [--only musetalk] [--out bench/results/variants.json]
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from memfit.jobs import BUILTIN

DEVICE = "a100-80gb"
VERSIONS: dict[str, list[str]] = {
    "gpt_sovits/s1": ["version=v1"],
    "gpt_sovits/s2": ["version=v1", "version=v2pro", "version=v2proplus"],
    "gpt_sovits/s2_v3": ["lora=16", "lora=32", "lora=64", "lora=128"],
}
"""Versions of a job beside its default."""
RESULTS = Path(__file__).parent / "results" / "variants.json"


@dataclass(frozen=True, kw_only=True)
class Cost:
    """What one prediction took in a process of its own; ``seconds`` is by the clock, whatever else ran."""

    variant: str
    processor_seconds: float
    seconds: float
    peak_bytes: int


def variants() -> list[list[str]]:
    """Arguments of ``memfit predict`` for every job and version."""
    return [[name, *setting] for name in BUILTIN for setting in ([], *(["--set", one] for one in _versions(name)))]


def _versions(name: str) -> list[str]:
    return VERSIONS.get(name, [])


def cost(arguments: list[str]) -> Cost:
    """Runs one prediction.

    Raises:
        RuntimeError: it failed otherwise than by not fitting.
    """
    command = [sys.executable, "-m", "memfit", "predict", *arguments, "--device", DEVICE, "--json"]
    begin = time.perf_counter()
    child = subprocess.Popen(command, stdout=subprocess.DEVNULL, env=os.environ | {"OMP_NUM_THREADS": "1"})
    _, status, usage = os.wait4(child.pid, 0)
    child.returncode = os.waitstatus_to_exitcode(status)
    if child.returncode not in (0, 3):
        raise RuntimeError(f"{' '.join(arguments)}: exit code {child.returncode}")
    return Cost(
        variant=" ".join(part for part in arguments if part != "--set"),
        processor_seconds=round(usage.ru_utime + usage.ru_stime, 2),
        seconds=round(time.perf_counter() - begin, 2),
        peak_bytes=usage.ru_maxrss * 1024,
    )


def main() -> None:
    """Prints the table and writes it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="variants whose name holds this text; default: all")
    parser.add_argument("--out", type=Path, default=RESULTS, help="where to write the table as JSON")
    options = parser.parse_args()
    print(f"{'variant':40} {'processor':>10} {'clock':>8} {'memory':>10}")
    costs = []
    for arguments in variants():
        if options.only in " ".join(arguments):
            one = cost(arguments)
            costs.append(one)
            print(
                f"{one.variant:40} {one.processor_seconds:8.1f} s {one.seconds:6.1f} s "
                f"{one.peak_bytes / 2**20:6.0f} MiB",
                flush=True,
            )
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps([asdict(one) for one in costs], indent=1) + "\n")


if __name__ == "__main__":
    main()
