"""Every configuration of torchtitan's registries, asked of memfit.

python -m bench.titan_registry [--only TEXT] [--workers N] [--json F]

Needs torchtitan 0.3 (pip install 'memfit[titan]'). Each is asked for as it is written, on 8 ranks of a B200 or on those
of its own mesh, in a process that may take 8 GiB and 10 minutes. Nothing of the answers was measured on a card. A
file that is there is continued: what it has is not asked for again.
"""

from __future__ import annotations

import argparse
import json
import re
import resource
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from bench.result_file import ROOT, add_json_option, target, write_result
from memfit.script.titan.config import configurations, importable

CARD, RANKS = "b200", 8
SECONDS, MEMORY = 600, 8 << 30
_RANKS_ASKED = re.compile(r"write --world (\d+)")
"""What memfit writes of a configuration whose mesh takes another number of ranks."""
SHOWN = ("allocated_bytes", "reserved_bytes")
PACKAGES = ("torchtitan", "triton", "torchao", "flash-linear-attention", "nvidia-cutlass-dsl")
"""What configurations need, or import where it is installed; PyPI has no ``deep_ep`` of the versions that two need."""


def main() -> int:
    """0; a configuration without an answer is a figure and no failure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="configurations with this text, as qwen3/")
    parser.add_argument("--workers", type=int, default=1)
    add_json_option(parser)
    asked = parser.parse_args()
    with importable():
        names = [f"{model}/{name}" for model, some in configurations().items() for name in some]
    file = target(asked.json, complete=not asked.only)
    rows = _rows_of(file)
    waiting = [name for name in names if asked.only in name and name not in rows]
    with ThreadPoolExecutor(asked.workers) as workers:
        for name, row in zip(waiting, workers.map(answer, waiting), strict=True):
            rows[name] = row
            print(f"{name:60} {row['seconds']:5.0f} s  {row.get('why') or _gib(row)}", flush=True)
            _write(file, names, rows)
    if not waiting:
        _write(file, names, rows)
    return 0


def _write(file: Path | None, names: list[str], rows: dict[str, Any]) -> None:
    figures = {"card": CARD, "configurations": len(names), "rows": {name: rows[name] for name in sorted(rows)}}
    write_result(file, figures, packages=PACKAGES)


def _rows_of(file: Path | None) -> dict[str, Any]:
    return json.loads(file.read_text())["rows"] if file is not None and file.exists() else {}


def answer(name: str) -> dict[str, Any]:
    """A prediction, or the line that says why there is none."""
    begin, ranks = time.monotonic(), RANKS
    row = _asked(name, ranks)
    if (other := _RANKS_ASKED.search(row.get("why", ""))) is not None:
        row = _asked(name, int(other[1]))
    return {**row, "seconds": round(time.monotonic() - begin)}


def _asked(name: str, ranks: int) -> dict[str, Any]:
    words = ["predict", f"torchtitan:{name}", "--device", CARD, "--world", str(ranks)]
    known = {"command": f"memfit {' '.join(words)}"}
    try:
        done = subprocess.run(
            [sys.executable, "-m", "memfit", *words, "--json"], cwd=ROOT, capture_output=True, text=True, check=False,
            timeout=SECONDS, preexec_fn=_limit,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return {**known, "why": f"no answer within {SECONDS} s"}
    if done.returncode not in (0, 3):
        lines = [line for line in done.stderr.splitlines() if line.startswith("memfit: ")]
        return {**known, "why": (lines or ["memfit: no line"])[-1].removeprefix("memfit: ")}
    phase = json.loads(done.stdout)["phases"]["train"]
    return {**known, **{kind: phase[kind] for kind in SHOWN}}


def _limit() -> None:
    resource.setrlimit(resource.RLIMIT_DATA, (MEMORY, MEMORY))


def _gib(row: dict[str, Any]) -> str:
    return f"{row['reserved_bytes'] / 2**30:.2f} GiB reserved"


if __name__ == "__main__":
    sys.exit(main())
