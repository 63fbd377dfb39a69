"""What a run's process needs beyond its tensors on a CPU: the smallest budget that a run of f5_tts/tiny passes in.

python -m bench.host_margin [--windows 4]
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

from memfit.plan import read_plan, write_plan
from memfit.sizes import format_size

STEP = 4 << 20


def main() -> None:
    """Plans three budgets, and runs each plan, without its prediction, in more and more memory until it passes."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--windows", type=int, default=4)
    windows = str(parser.parse_args().windows)
    for memory in ("90MiB", "120MiB", "200MiB"):
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "plan.toml"
            _memfit("plan", "f5_tts/tiny", "--global-batch", "4000", "--memory", memory, "--out", str(path))
            plan = read_plan(path)
            predicted = plan.phases["train"]["allocated_bytes"]
            more = STEP
            while True:
                write_plan(replace(plan, budget_bytes=predicted + more, phases={}), path)
                if _memfit("run", str(path), "--out", f"{folder}/{more}", "--windows", windows) == 0:
                    break
                more += STEP
            print(
                f"{memory}: tensors {format_size(predicted)}, passes with {format_size(more)} more, "
                f"not with {format_size(more - STEP)}"
            )


def _memfit(*arguments: str) -> int:
    return subprocess.run([sys.executable, "-m", "memfit", *arguments], capture_output=True).returncode


if __name__ == "__main__":
    main()
