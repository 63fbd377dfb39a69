"""Fills the marked blocks of README.md with what its commands print now, and with the files that it shows.

python docs/readme.py

A block begins with <!-- run: memfit ... -->, <!-- file: path --> or
<!-- table: bench/results/published.json --> and ends with <!-- end -->.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
BLOCK = re.compile(r"<!-- (run|file|table): (.*?) -->\n.*?<!-- end -->", re.DOTALL)


def blocks(text: str) -> dict[str, str]:
    """Every marked block as it stands, by its first line."""
    return {f"{match[1]}: {match[2]}": match[0] for match in BLOCK.finditer(text)}


def fresh(block: str) -> str:
    """The block of this first line, made anew."""
    kind, _, what = block.partition(": ")
    if kind == "table":
        return f"<!-- {block} -->\n{published(json.loads((ROOT / what).read_text()))}\n<!-- end -->"
    if kind == "file":
        language, content = "python", (ROOT / what).read_text()
    else:
        language, content = "text", f"$ {what}\n{printed(what)}"
    return f"<!-- {block} -->\n```{language}\n{content.rstrip()}\n```\n<!-- end -->"


def published(results: dict[str, Any]) -> str:
    """bench/published.py's rows as a Markdown table. A GB of a tool is GiB; of a README, who knows: both are shown."""
    lines = ["| job, micro-batch | run as | published | predicted | off |", "|---|---|---|---|---|"]
    for row in results["rows"]:
        several = row["world"] > 1 or row["engine"] == "zero2"
        run_as = row["engine"] + (f" on {row['world']}" if several else "") + f", {row['card']}"
        predicted = f"{row['predicted_bytes'] / 2**30:.2f} GiB"
        if row["sequence_bytes"]:
            predicted += f", {row['sequence_bytes'] / 2**30:.1f} after 150 batches of varying lengths"
        off = f"{row['error']:+.1%}"
        if row["error_decimal"] is not None:
            off += f" ({row['error_decimal']:+.1%} if 10⁹)"
        what = "" if row["kind"] == "process" else f" {row['kind']}"
        job = f"{row['job']}, {row['micro_batch']} {row['unit']}, {row['phase']}{what}"
        lines.append(f"| {job} | {run_as} | {row['published']} | {predicted} | {off} |")
    return "\n".join(lines)


def printed(command: str) -> str:
    """What a memfit command prints, on both of its outputs, in 80 columns."""
    program, *arguments = shlex.split(command)
    if program != "memfit":
        raise ValueError(f"{command}: README runs memfit alone")
    environment = {**os.environ, "COLUMNS": "80", "NO_COLOR": "1", "OMP_NUM_THREADS": "1"}
    run = [sys.executable, "-m", "memfit", *arguments]
    done = subprocess.run(
        run, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=ROOT, env=environment, check=False
    )
    return "\n".join(line.rstrip() for line in done.stdout.splitlines())


def without_times(text: str) -> str:
    """The text with every duration masked: those are another each time."""
    return re.sub(r"\b\d+(\.\d+)? s\b", "… s", text)


def main() -> None:
    """Rewrites README.md."""
    text = README.read_text()
    README.write_text(BLOCK.sub(lambda match: fresh(f"{match[1]}: {match[2]}"), text))


if __name__ == "__main__":
    main()
