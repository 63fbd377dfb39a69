"""How long it takes, and how much memory, to predict a rank of a large mesh and to choose a mesh.

python -m bench.large_mesh [--only predict,plan] [--json F]

Processor time is what a machine that does nothing else takes on one core; ``wall_seconds`` is by the clock, whatever
else ran. ``peak_bytes`` is the largest resident set of the command's processes, as the operating system counted it.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from typing import Any

from bench.result_file import add_json_option, target, write_result

JOB = "bench/llama3_job.py:Llama3"
COMMANDS = {
    "predict": [
        "predict", JOB, "--set", "size=405b", "--set", "checkpoint=all", "--micro-batch", "8192",
        "--mesh", "dp_shard=512,tp=8", "--device", "h100", "--json",
    ],
    "plan": ["plan", JOB, "--global-batch", "1048576", "--devices", "64", "--nodes", "8", "--device", "h100", "--json"],
}  # fmt: skip
MOST_SECONDS, MOST_BYTES = 180, 4 << 30
"""Processor time and memory that a prediction may take."""
SHOWN = ("allocated_bytes", "reserved_bytes", "process_bytes", "process_bytes_low", "process_bytes_high", "categories")
ANSWERED = (0, 3)
"""Exit codes of an answer: it fits, or nothing fits."""


def main() -> int:
    """1 where the prediction takes longer, or more memory, than it may."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=",".join(COMMANDS), help="some of the commands")
    add_json_option(parser)
    asked = parser.parse_args()
    figures = {name: measured(name) for name in asked.only.split(",")}
    print(json.dumps(figures, indent=1))
    write_result(target(asked.json, complete=figures.keys() == COMMANDS.keys()), figures, packages=("transformers",))
    took = figures.get("predict", {"processor_seconds": 0, "peak_bytes": 0})
    return int(took["processor_seconds"] > MOST_SECONDS or took["peak_bytes"] > MOST_BYTES)


def measured(name: str) -> dict[str, Any]:
    """What a command takes, and what it answers."""
    begin = time.perf_counter()
    started = subprocess.Popen([sys.executable, "-m", "memfit", *COMMANDS[name]], stdout=subprocess.PIPE, text=True)
    assert started.stdout is not None
    text = started.stdout.read()
    _, status, used = os.wait4(started.pid, 0)
    code = os.waitstatus_to_exitcode(status)
    if code not in ANSWERED:
        raise RuntimeError(f"memfit {' '.join(COMMANDS[name])} ended with {code}")
    answer = json.loads(text)
    return {
        "asked": "memfit " + " ".join(COMMANDS[name]),
        "processor_seconds": round(used.ru_utime + used.ru_stime, 1),
        "wall_seconds": round(time.perf_counter() - begin, 1),
        "peak_bytes": used.ru_maxrss * 1024,
        "fits": answer["fits"],
        **(_predicted(answer) if name == "predict" else _planned(answer)),
    }


def _predicted(answer: dict[str, Any]) -> dict[str, Any]:
    train = answer["phases"]["train"]
    return {
        "ranks": answer["world"], "rank": answer["rank"], "rank_reason": answer["rank_reason"],
        "parameters": sum(net["parameters"] for net in answer["nets"]),
        "train": {key: train[key] for key in SHOWN}, "at": train["at"],
    }  # fmt: skip


def _planned(answer: dict[str, Any]) -> dict[str, Any]:
    return {
        "mesh": answer.get("mesh"), "arithmetic": answer.get("arithmetic"), "step_seconds": answer["step_seconds"],
        "communication": answer["communication"], "reasons": {key: answer["reasons"][key] for key in ("mesh", "time")},
        "meshes": answer["meshes"],
    }  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
