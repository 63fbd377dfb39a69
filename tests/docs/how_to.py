"""Runs a how-to page: its files and edits are made in a copy of the package, and its commands are run there.

A comment before a code block says what the block is: ``create: path`` (a new file), ``append: path`` (added at the
end) or ``patch: path`` (a diff whose lines replace what stands there once). A ``console`` block holds commands, each
after ``$ ``, and what they must print: the words of a line, in order, with ``...`` for anything.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
STEP = re.compile(r"<!-- (create|append|patch): (\S+) -->\n```\w+\n(.*?)```|```console\n(.*?)```", re.DOTALL)


def follow(page: Path, folder: Path) -> list[str]:
    """Does what the page says in ``folder``; returns the commands that were run.

    Raises:
        AssertionError: an edit does not apply, or a command fails or does not print what the page shows.
    """
    for name in ("memfit", "examples"):
        shutil.copytree(ROOT / name, folder / name)  # with what Python has compiled already
    commands = []
    for kind, name, content, console in STEP.findall(page.read_text()):
        if console:
            commands += run_console(console, folder)
        else:
            edit(folder / name, kind, content)
    return commands


def edit(path: Path, kind: str, content: str) -> None:
    """Creates, extends or patches a file."""
    if kind == "create":
        assert not path.exists(), f"{path} is there already"
        path.write_text(content)
    elif kind == "append":
        path.write_text(f"{path.read_text()}\n{content}")
    else:
        lines = content.splitlines()
        before, after = ("\n".join(line[1:] for line in lines if line[:1] != skipped) + "\n" for skipped in ("+", "-"))
        text = path.read_text()
        assert text.count(before) == 1, f"{path.name} has these lines {text.count(before)} times:\n{before}"
        path.write_text(text.replace(before, after))


def run_console(console: str, folder: Path) -> list[str]:
    """Runs each command of a console block in ``folder`` and compares what it prints."""
    commands = []
    for part in re.split(r"^\$ ", console, flags=re.MULTILINE)[1:]:
        command, *wanted = part.strip().splitlines()
        program, *arguments = shlex.split(command)
        assert program == "memfit", command
        environment = {
            **os.environ,
            "PYTHONPATH": str(folder),
            "COLUMNS": "200",
            "NO_COLOR": "1",
            "OMP_NUM_THREADS": "1",
        }
        done = subprocess.run(
            [sys.executable, "-m", "memfit", *arguments],
            cwd=folder, env=environment, capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
        for line in wanted:
            pattern = r"[\s\S]*".join(re.escape(words.strip()) for words in line.split("..."))
            assert re.search(pattern, done.stdout + done.stderr), f"{command}\nprints no {line!r}:\n{done.stdout}"
        commands.append(command)
    return commands
