"""A training command behind ``--``, in place of the job of ``predict``, ``max``, ``cards``, ``compare`` and ``ui``."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from memfit.errors import InputError
from memfit.script.command_line import LAUNCHERS, STARTS, is_command_line

if TYPE_CHECKING:
    from memfit.script.asked_script import AskedScript

VERBS = ("predict", "max", "cards", "compare", "ui")
_TAKES_LINE = "plan"
"""The verb whose argument is a command in one word, without ``MARK``."""
_TAKES_WORDS = "trace"
MARK = "-- "
"""Begins an argument that is a command."""


def joined_scripts(arguments: list[str]) -> list[str]:
    """A verb's arguments, with each command behind ``--`` as one argument that begins with ``MARK``.

    ``compare`` takes several, each behind a ``--`` of its own.

    Raises:
        InputError: the verb takes no script, or the command is not behind ``--``.
    """
    verb, end = arguments[0], arguments.index("--") if "--" in arguments else len(arguments)
    words = arguments[end + 1 :]
    if verb in VERBS:
        _check_mark(verb, arguments[:end])
    if verb == _TAKES_WORDS or not (_is_command(words) or (verb in VERBS and _may_be_command(verb, words))):
        return arguments
    if verb == _TAKES_LINE:
        return [*arguments[:end], "--", shlex.join(words)]
    if verb not in VERBS and Path(words[0]).name not in STARTS:
        return arguments
    if verb not in VERBS:
        raise _no_script(verb, words)
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


def _no_script(verb: str, words: Sequence[str]) -> InputError:
    script = next((word for word in words if word.endswith(".py")), None)
    write = (
        f"write memfit lint {script}" if verb == "lint" and script else f"see memfit {verb} --help for what it takes"
    )
    takers = ", ".join(sorted((*VERBS, _TAKES_LINE, _TAKES_WORDS)))
    return InputError(f"memfit {verb} -- {shlex.join(words)}", f"a script's command goes with {takers}", write)


def _check_mark(verb: str, before: Sequence[str]) -> None:
    """Refuses a command that is not behind ``--``, such as ``memfit predict python train.py``, or that is one word.

    Args:
        before: the arguments before ``--``.
    """
    lines = [word for word in before if len(word.split()) > 1 and is_command_line(word)]
    if lines:
        commands = (f"-- {'python ' if line.split()[0].endswith('.py') else ''}{line}" for line in lines)
        write = " ".join(["memfit", shlex.join(word for word in before if word not in lines), *commands])
        raise InputError(
            f"memfit {verb} {shlex.quote(lines[0])}", "a script's command goes behind --", f"write {write}"
        )
    for at, word in enumerate(before):
        if word in STARTS and any(later.endswith(".py") or later == "-m" for later in before[at + 1 :]):
            write = f"write memfit {shlex.join(before[:at])} -- {shlex.join(before[at:])}"
            raise InputError(f"memfit {shlex.join(before)}", "a script's command goes behind --", write)


def _may_be_command(verb: str, words: Sequence[str]) -> bool:
    """Whether what is behind ``--`` is meant as a command, though it names no script: these verbs take one job."""
    return bool(words) and (words[0] in STARTS or (verb != "compare" and len(words) > 1))


def _is_command(words: Sequence[str]) -> bool:
    return any(word.endswith(".py") or word == "-m" or word in LAUNCHERS for word in words)
