"""Predictions beside the memory that torchtitan and torchao published: python -m bench.titan [--json F]

Reads bench/titan.toml. Rows whose step bench/titan_scripts/llama3.py runs are predicted by ``memfit trace`` on a
simulated process group; all others are listed as not validated, with the reason. No number here was fitted to them.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

from bench.result_file import ROOT, add_json_option, target, write_result
from memfit import toml

FIGURES = Path(__file__).with_suffix(".toml")
SCRIPT = "bench/titan_scripts/llama3.py"
CARD, MEMORY = "h100", "95GiB"
GIB = 2**30
SHOWN = ("allocated_bytes", "reserved_bytes", "process_bytes", "process_bytes_low", "process_bytes_high")


def main() -> int:
    """0; an error is a figure and no failure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_json_option(parser)
    asked = parser.parse_args()
    table = toml.loads(FIGURES.read_text())
    figures = {"rows": [row(each) for each in table["row"]], "difference": difference(table["difference"])}
    print(json.dumps(figures, indent=1))
    write_result(target(asked.json), figures)
    return 0


def row(figure: dict[str, Any]) -> dict[str, Any]:
    """A published row with what is predicted for it; ``validated`` is false where nothing is."""
    known = {name: figure[name] for name in ("source", "net", "how", "ranks", "batch", "published")}
    if "script" not in figure:
        return {**known, "validated": False, "why": figure["why"]}
    predicted = traced(figure["ranks"], tuple(figure["script"]))
    return {
        **known, "validated": True, "command": command(figure["ranks"], figure["script"]),
        "predicted": round(predicted["reserved_bytes"] / GIB, 2),
        "error": round(predicted["reserved_bytes"] / GIB / figure["published"] - 1, 4),
        **{name: predicted[name] for name in SHOWN}, "categories": predicted["categories"],
    }  # fmt: skip


def difference(figure: dict[str, Any]) -> dict[str, Any]:
    """What two numbers of ranks differ in, in GiB reserved and allocated."""
    few, many = (traced(ranks, tuple(figure["script"])) for ranks in figure["ranks"])
    return {
        "ranks": figure["ranks"], "published": figure["published"],
        "predicted": round((few["reserved_bytes"] - many["reserved_bytes"]) / GIB, 2),
        "predicted_allocated": round((few["allocated_bytes"] - many["allocated_bytes"]) / GIB, 2),
    }  # fmt: skip


def command(ranks: int, arguments: list[str]) -> str:
    """The command whose answer is the prediction."""
    torchrun = f"torchrun --nproc-per-node 8 {SCRIPT} {' '.join(arguments)}"
    return f"memfit trace --device {CARD} --memory {MEMORY} --world {ranks} -- {torchrun}"


@cache
def traced(ranks: int, arguments: tuple[str, ...]) -> dict[str, Any]:
    """The training phase of one rank, as the JSON of ``memfit trace`` has it."""
    words = command(ranks, list(arguments)).split()[1:]
    with tempfile.TemporaryDirectory() as folder:
        answer = Path(folder) / "answer.json"
        words[words.index("--") : words.index("--")] = ["--json", str(answer)]
        subprocess.run([sys.executable, "-m", "memfit", *words], cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
        phase: dict[str, Any] = json.loads(answer.read_text())["phases"]["train"]
    return phase


if __name__ == "__main__":
    sys.exit(main())
