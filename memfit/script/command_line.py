"""A script's command in one argument: ``"train.py --config c.yaml"`` or ``"torchrun --nproc-per-node 2 train.py"``."""

from __future__ import annotations

import shlex
from dataclasses import replace
from pathlib import Path

from memfit.errors import InputError
from memfit.script.command import parse_command, torchrun_variables
from memfit.script.outcome import ScriptCommand

LAUNCHERS = ("torchrun", "accelerate", "deepspeed")
STARTS = ("python", "python3", *LAUNCHERS)
"""What a command may begin with."""


def is_command_line(text: str) -> bool:
    """Whether a text is a script or its command, and no name of a job (``path/file.py:Name``)."""
    first = text.split(maxsplit=1)[0] if text.strip() else ""
    return first.endswith(".py") or (len(text.split()) > 1 and Path(first).name in STARTS)


def parse_command_line(text: str) -> ScriptCommand:
    """The script and its launcher; the ranks of a launcher get the variables that it would set.

    Raises:
        InputError: it cannot be split into words, names no script, or the file does not exist.
    """
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise InputError(repr(text), f"not a command ({error})", "write it as in a shell, with both quotes") from error
    command = parse_command(["python", *words] if words and words[0].endswith(".py") else words)
    if command.world == 1:
        return command
    local = int(command.environment.get("LOCAL_WORLD_SIZE", command.world))
    variables = torchrun_variables(command.world, min(local, command.world), 0)
    return replace(command, environment=command.environment | variables)
