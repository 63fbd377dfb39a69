"""Makes the marked blocks of README.md and docs/*.md anew, from commands, files and results.

python docs/blocks.py [PAGE ...]

A block begins with one of these lines and ends with <!-- end -->:

    <!-- run: memfit ... -->   what the command prints now
    <!-- run 12: memfit ... -->  its first 12 lines
    <!-- file: path -->        the file's text
    <!-- table: name -->       a table of docs/tables.py, made from bench/results
    <!-- text: name -->        a paragraph of docs/tables.py, made from bench/results or from the code

tests/docs/test_blocks.py fails where a block is not what is made now.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from docs.tables import TABLES, TEXTS  # noqa: E402

BLOCK = re.compile(r"<!-- (run(?: \d+)?|file|table|text): (.*?) -->\n.*?<!-- end -->", re.DOTALL)
LANGUAGES = {".py": "python", ".toml": "toml", ".sh": "bash"}


def pages() -> list[Path]:
    """README and every page of the documentation."""
    return [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def blocks(text: str) -> dict[str, str]:
    """Every marked block of a page as it stands, by its first line."""
    return {f"{match[1]}: {match[2]}": match[0] for match in BLOCK.finditer(text)}


def fresh(block: str) -> str:
    """The block with this first line, made anew."""
    kind, _, what = block.partition(": ")
    if kind in ("table", "text"):
        content = (TABLES if kind == "table" else TEXTS)[what]()
    elif kind == "file":
        content = f"```{LANGUAGES[Path(what).suffix]}\n{(ROOT / what).read_text().rstrip()}\n```"
    else:
        lines = printed(what).rstrip().splitlines()
        count = int(kind.removeprefix("run").strip() or len(lines))
        shown = [*lines[:count], *(["..."] if count < len(lines) else [])]
        content = "\n".join(["```text", f"$ {what}", *shown, "```"])
    return f"<!-- {block} -->\n{content}\n<!-- end -->"


@cache
def printed(command: str) -> str:
    """What a memfit command prints on both of its outputs, in 110 columns, without the warnings of libraries."""
    program, *arguments = shlex.split(command)
    if program != "memfit":
        raise ValueError(f"{command}: a block runs memfit alone")
    environment = {
        **os.environ, "COLUMNS": "110", "NO_COLOR": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT),
        "PYTHONWARNINGS": "ignore",
    }  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-m", "memfit", *arguments],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=ROOT, env=environment, check=False,
    )  # fmt: skip
    return "\n".join(line.rstrip() for line in done.stdout.splitlines())


def without_times(text: str) -> str:
    """The text with every duration masked: a duration differs from run to run."""
    return re.sub(r"\b\d+(\.\d+)? s\b", "… s", text)


def main() -> None:
    """Rewrites the pages that are named, or all."""
    for page in [Path(name).resolve() for name in sys.argv[1:]] or pages():
        text = page.read_text()
        changed = BLOCK.sub(lambda match: fresh(f"{match[1]}: {match[2]}"), text)
        if changed != text:
            page.write_text(changed)
            print(f"rewrote {page.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
