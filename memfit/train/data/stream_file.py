"""RUN/stream.json: the states of a stream with which the windows of the newest checkpoints begin.

Where there is no state for a checkpoint, or one that JSON cannot hold, a resumed run reads the stream from its start up
to the position of the checkpoint.
"""

from __future__ import annotations

import contextlib
import json
from dataclasses import asdict
from typing import Any

from memfit.atomic_file import write_atomic
from memfit.train.data.stream import StreamState
from memfit.train.run_folder import RunFolder, writing

NAME = "stream.json"
KEPT = 16
"""States that stay, the newest ones."""


def write_stream_state(folder: RunFolder, state: StreamState | None) -> None:
    """Adds the state with which a window begins.

    Raises:
        CannotWriteError: the folder cannot be written.
    """
    if state is None:
        return
    try:
        text = json.dumps([*map(asdict, _states(folder)), asdict(state)][-KEPT:])
    except (TypeError, ValueError):
        return
    with writing(folder.path / NAME):
        write_atomic(folder.path / NAME, text)


def read_stream_state(folder: RunFolder, position: int) -> StreamState | None:
    """The newest state at or before a position; None where there is none."""
    known = [state for state in _states(folder) if state.position <= position]
    return max(known, key=lambda state: state.position, default=None)


def _states(folder: RunFolder) -> list[StreamState]:
    """The states that can be read: a damaged file has none."""
    with contextlib.suppress(OSError, ValueError, TypeError, RecursionError):
        values: list[dict[str, Any]] = json.loads((folder.path / NAME).read_text())
        return [StreamState(**value) for value in values if _is_state(value)]
    return []


def _is_state(value: Any) -> bool:
    names = ("position", "epoch", "position_in_epoch")
    return isinstance(value, dict) and all(type(value.get(name)) is int and value[name] >= 0 for name in names)
