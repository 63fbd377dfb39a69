"""Processor and clock time of whole ``memfit plan`` commands, for nets of about 850 M parameters.

python -m bench.plan_speed [--only TEXT] [--json F]

Each command runs in a process of its own, from its start to its end, on one thread, and on a second core where the
machine has one. The clock counts only on a quiet machine: before each command both cores run the same loop at once,
whose seconds say what the machine gives. Two of the jobs are files that nobody tuned for: a
Transformers decoder and a diffusers U-Net, as a person would write them.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from bench.result_file import ROOT, add_json_option, target, timed_environment, write_result

JOBS = Path(__file__).resolve().parent.relative_to(ROOT) / "plan_speed_jobs.py"
MOST = 60.0
"""Seconds of the processor that a command may take."""
CASES: list[tuple[str, str, str, dict[str, str]]] = [
    ("latentsync/stage1", "6", "rtx3090", {}),
    ("latentsync/stage1", "16", "a100-40gb", {}),
    ("musetalk/stage1", "32", "l40s", {}),
    ("latentsync/stage2", "4", "a100-80gb", {}),
    ("f5_tts/base", "38400", "rtx3090", {}),
    (f"{JOBS}:Decoder", "16", "rtx3090", {}),
    (f"{JOBS}:Unet", "16", "rtx3090", {}),
]
"""Job, global batch, card, settings."""
LOOP = """
import time
n, begin = 0, time.perf_counter()
for i in range(3_000_000):
    n += i * i % 7
print(time.perf_counter() - begin)
"""
"""A piece of Python whose seconds are those of a core."""


def main() -> int:
    """Prints a line for each command; 1 where one takes longer than ``MOST``."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="commands with this text, as Decoder")
    add_json_option(parser)
    asked = parser.parse_args()
    rows: dict[str, Any] = {}
    ok = True
    for job, batch, card, settings in CASES:
        name = f"{job.rpartition('/')[2] if job.endswith(('Decoder', 'Unet')) else job} {batch} {card}"
        if asked.only in name:
            row = timed(job, batch, card, settings)
            rows[name] = row
            ok &= row["processor_seconds"] <= MOST
            print(
                f"{name:44} {row['processor_seconds']:6.1f} s of the processor, "
                f"{row['clock_seconds']:6.1f} s by the clock (loop {row['loop_seconds']:.2f} s)  {row['arithmetic']}, "
                f"{row['step_seconds']}",
                flush=True,
            )
    figures = {"most_seconds": MOST, "plans": rows}
    write_result(target(asked.json, complete=not asked.only), figures, packages=["diffusers", "transformers"])
    return int(not ok)


def loop_seconds() -> float:
    """Seconds of the loop where two processes run it at once: the slower one's."""
    command = [sys.executable, "-c", LOOP]
    both = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    return max(float(process.communicate()[0]) for process in both)


def timed(job: str, batch: str, card: str, settings: dict[str, str]) -> dict[str, Any]:
    """One command's seconds of the processor (of all its processes) and by the clock, and what it found."""
    pairs = [word for name, value in settings.items() for word in ("--set", f"{name}={value}")]
    command = [sys.executable, "-m", "memfit", "plan", job, "--global-batch", batch, "--device", card, *pairs, "--json"]
    loop = loop_seconds()
    before, begin = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    done = subprocess.run(command, cwd=ROOT, env=timed_environment(), capture_output=True, text=True)
    after, end = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    if not done.stdout:
        raise RuntimeError(done.stderr)
    answer = json.loads(done.stdout)
    return {
        "processor_seconds": after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime,
        "clock_seconds": end - begin,
        "loop_seconds": loop,
        "fits": answer["fits"],
        "arithmetic": answer.get("arithmetic"),
        "step_seconds": answer["step_seconds"],
        "modes": {
            mode: list(answer["checkpointing"].values()).count(mode) for mode in answer["checkpointing"].values()
        },
        "process_bytes": {phase: row["process_bytes"] for phase, row in answer["phases"].items()},
    }


if __name__ == "__main__":
    sys.exit(main())
