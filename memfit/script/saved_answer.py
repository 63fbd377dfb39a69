"""Reads the answer of ``memfit trace --json FILE`` for ``memfit plan --from-trace FILE``."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from memfit.errors import InputError, why_unreadable
from memfit.script.outcome import ScriptOption

_WRITE = "write the file of memfit trace --json FILE -- python train.py"


@dataclass(frozen=True, kw_only=True)
class SavedAnswer:
    """The part of a script's trace that its plan needs.

    Attributes:
        script: the script's path or module.
        device: the key of the traced card.
        process_bytes: the largest need of any phase.
        training_bytes: the need of training, the phase in which the options save.
        options: memory-saving options, the largest saving first.
        largest_batch: of the command's ``{batch}``; None if it was not searched for or not found.
    """

    script: str
    device: str
    process_bytes: int
    training_bytes: int
    options: tuple[ScriptOption, ...]
    largest_batch: int | None


def read_answer_file(path: str) -> SavedAnswer:
    """Raises:
    InputError: the file cannot be read, or is no answer of a script with a verdict.
    """
    try:
        values: Any = json.loads(Path(path).read_text("utf-8"))
    except OSError as error:
        raise InputError(f"--from-trace {path}", f"it cannot be read: {why_unreadable(error)}", _WRITE) from error
    except (ValueError, RecursionError) as error:
        raise InputError(f"--from-trace {path}", "it is not JSON", _WRITE) from error
    return read_answer(values, f"--from-trace {path}", _WRITE)


def read_answer(values: Any, seen: str, write: str) -> SavedAnswer:
    """The answer of ``memfit.script.answer_json``.

    Args:
        seen: what gave the values, as the user wrote it; for an error, as is ``write``.

    Raises:
        InputError: it is no such answer, or one without a verdict.
    """
    try:
        if not values["phases"] or values["windows"] < 2:
            raise InputError(seen, "the trace reached no verdict", "trace the script to two steps")
        needs = {name: int(phase["process_bytes"]) for name, phase in values["phases"].items()}
        return SavedAnswer(
            script=str(values["script"]),
            device=str(values["device"]["name"]),
            process_bytes=max(needs.values()),
            training_bytes=needs["train"],
            options=tuple(map(_read_option, values["options"])),
            largest_batch=(values["largest_batch"] or {}).get("batch"),
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise InputError(seen, "it is not an answer of memfit trace", write) from error


def _read_option(values: Any) -> ScriptOption:
    """An option of a file that anyone may have written."""
    saves = values["saves_bytes"]
    return ScriptOption(
        name=str(values["name"]), saves_bytes=None if saves is None else int(saves), where=str(values["where"]),
        write=str(values["write"]), reason=str(values.get("reason", "")),
        for_tools={str(tool): str(words) for tool, words in values.get("for_tools", {}).items()},
    )  # fmt: skip
