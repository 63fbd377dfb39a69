"""Runs a command on a terminal of its own, as a person does."""

from __future__ import annotations

import os
import pty
import subprocess
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path


def run_on_terminal(
    command: Sequence[str],
    folder: Path,
    environment: dict[str, str],
    meanwhile: Callable[[subprocess.Popen[bytes]], None] = lambda process: None,
) -> tuple[int, str]:
    """(exit code, what the terminal showed) of a command.

    Args:
        meanwhile: called once it runs.
    """
    master, terminal = pty.openpty()
    process = subprocess.Popen(command, cwd=folder, env=environment, stdout=terminal, stderr=terminal)
    os.close(terminal)
    meanwhile(process)
    shown = b""
    with suppress(OSError):  # what a terminal says once the last process that holds it has ended
        while part := os.read(master, 1 << 16):
            shown += part
    os.close(master)
    return process.wait(), shown.decode(errors="replace")
