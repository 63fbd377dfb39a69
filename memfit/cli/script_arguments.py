"""A training command behind ``--``, in place of the job of ``predict``, ``max``, ``cards``, ``compare`` and ``ui``."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from memfit.errors import InputError

if TYPE_CHECKING:
    from memfit.script.asked_script import AskedScript

VERBS = ("predict", "max", "cards", "compare", "ui")
MARK = "-- "
"""Begins an argument that is a command."""


def joined_scripts(arguments: list[str]) -> list[str]:
    """A verb's arguments, with each command behind ``--`` as one argument that begins with ``MARK``.

    ``compare`` takes several, each behind a ``--`` of its own.
    """
    verb, end = arguments[0], arguments.index("--") if "--" in arguments else len(arguments)
    words = arguments[end + 1 :]
    if verb not in VERBS or not _is_command(words):
        return arguments
    commands: list[list[str]] = [[]]
    for word in words:
        if word == "--" and verb == "compare":
            commands.append([])
        else:
            commands[-1].append(word)
    return [*arguments[:end], "--", *(MARK + shlex.join(command) for command in commands)]


def is_script(job: str) -> bool:
    """Whether an argument is a command that ``joined_scripts`` joined."""
    return job.startswith(MARK)


def asked_script(job: str, options: dict[str, Any]) -> AskedScript:
    """The command for several questions.

    Args:
        options: options that change a job; a script takes none of them.
    """
    from memfit.script.asked_script import AskedScript

    for name, value in options.items():
        if value:
            raise InputError(
                f"{name} with {job[len(MARK) :]}", "a script is asked as it is written", f"leave {name} out"
            )
    return AskedScript(shlex.split(job[len(MARK) :]))


def _is_command(words: Sequence[str]) -> bool:
    launchers = ("torchrun", "accelerate", "deepspeed")
    return any(word.endswith(".py") or word == "-m" or word in launchers for word in words)
