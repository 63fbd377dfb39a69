"""Bytes that ``memfit predict`` answers for every built-in job and version, on a card and on the CPU, as one JSON file.

python -m bench.predict_bytes --out BEFORE.json       on one commit
python -m bench.predict_bytes --against BEFORE.json   on another: exits with 1 where a byte differs
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

DEVICES = ("rtx4090", "cpu")
VERSIONS = {
    "gpt_sovits/s1": ["version=v1"],
    "gpt_sovits/s2": ["version=v1", "version=v2pro", "version=v2proplus"],
    "gpt_sovits/s2_v3": ["lora=16", "lora=32", "lora=64", "lora=128"],
}
COMPARED = (
    "allocated_bytes",
    "reserved_bytes",
    "process_bytes",
    "process_bytes_low",
    "process_bytes_high",
    "categories",
)


def variants() -> list[list[str]]:
    """Arguments of ``memfit predict`` for every job, version and device; on the CPU the tiny jobs alone."""
    listed = subprocess.run([sys.executable, "-m", "memfit", "jobs", "--json"], capture_output=True, check=True)
    names = [job["name"] for job in json.loads(listed.stdout)["jobs"]]
    settings = [(name, setting) for name in names for setting in (None, *VERSIONS.get(name, []))]
    return [
        [name, *(["--set", setting] if setting else []), "--device", device]
        for device in DEVICES
        for name, setting in settings
        if device != "cpu" or name.endswith("/tiny")
    ]


def predicted_bytes(arguments: list[str]) -> dict[str, Any]:
    """The compared bytes of each phase of one prediction."""
    command = [sys.executable, "-m", "memfit", "predict", *arguments, "--json"]
    if "cpu" in arguments:
        command += ["--memory", "8GiB"]
    answer = subprocess.run(command, capture_output=True, check=False)
    if answer.returncode not in (0, 3):
        raise RuntimeError(f"{' '.join(arguments)}: exit code {answer.returncode}: {answer.stderr.decode()[-500:]}")
    phases = json.loads(answer.stdout)["phases"]
    return {name: {key: phase[key] for key in COMPARED} for name, phase in phases.items() if phase}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--against", type=Path)
    parser.add_argument("--only", default="", help="text that a variant's arguments contain")
    options = parser.parse_args()
    before = json.loads(options.against.read_text()) if options.against else {}
    after: dict[str, Any] = {}
    different = 0
    for arguments in variants():
        name = " ".join(arguments)
        if options.only not in name:
            continue
        after[name] = predicted_bytes(arguments)
        same = not before or before.get(name) == after[name]
        different += not same
        print(
            name, "" if not before else "equal" if same else f"DIFFERS: {before.get(name)} -> {after[name]}", flush=True
        )
    if options.out:
        options.out.write_text(json.dumps(after, indent=1) + "\n")
    return 1 if different else 0


if __name__ == "__main__":
    sys.exit(main())
