"""Processor time and memory of ``memfit predict`` for every built-in job and version of one.

python -m bench.variants [--only musetalk] [--json F]
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from dataclasses import asdict, dataclass

from bench.result_file import add_json_option, target, timed_environment, write_result
from memfit.jobs import BUILTIN

DEVICE = "a100-80gb"
VERSIONS: dict[str, list[str]] = {
    "gpt_sovits/s1": ["version=v1"],
    "gpt_sovits/s2": ["version=v1", "version=v2pro", "version=v2proplus"],
    "gpt_sovits/s2_v3": ["lora=16", "lora=32", "lora=64", "lora=128"],
}
"""Versions of a job beside its default."""


@dataclass(frozen=True, kw_only=True)
class Cost:
    """What one prediction took in a process of its own; ``seconds`` is by the clock, whatever else ran."""

    variant: str
    processor_seconds: float
    seconds: float
    peak_bytes: int


def variants() -> list[list[str]]:
    """Arguments of ``memfit predict`` for every job and version."""
    return [
        [name, *choice] for name in BUILTIN for choice in ([], *(["--set", setting] for setting in _versions(name)))
    ]


def _versions(name: str) -> list[str]:
    return VERSIONS.get(name, [])


def cost(arguments: list[str]) -> Cost:
    """Runs one prediction.

    Raises:
        RuntimeError: it failed otherwise than by not fitting.
    """
    command = [sys.executable, "-m", "memfit", "predict", *arguments, "--device", DEVICE, "--json"]
    begin = time.perf_counter()
    child = subprocess.Popen(command, stdout=subprocess.DEVNULL, env=timed_environment())
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
    add_json_option(parser)
    options = parser.parse_args()
    print(f"{'variant':40} {'processor':>10} {'clock':>8} {'memory':>10}")
    costs = []
    for arguments in variants():
        if options.only in " ".join(arguments):
            variant_cost = cost(arguments)
            costs.append(variant_cost)
            print(
                f"{variant_cost.variant:40} {variant_cost.processor_seconds:8.1f} s {variant_cost.seconds:6.1f} s "
                f"{variant_cost.peak_bytes / 2**20:6.0f} MiB",
                flush=True,
            )
    figures = {"device": DEVICE, "variants": [asdict(row) for row in costs]}
    write_result(target(options.json, complete=not options.only), figures, packages=["diffusers", "transformers"])


if __name__ == "__main__":
    main()
