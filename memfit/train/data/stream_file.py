"""RUN/stream.json: the states of a stream with which the windows of the newest checkpoints begin.

Where there is no state for a checkpoint, a resumed run reads the stream from its start up to the position of the
checkpoint.
"""

from __future__ import annotations

import contextlib
import json
from dataclasses import asdict
from typing import Any

from memfit.atomic_file import write_atomic
from memfit.train.checkpoint.state_codec import decode_alone
from memfit.train.data.stream import StreamState
from memfit.train.run_folder import RunFolder, writing

NAME = "stream.json"
KEPT = 16
"""States that stay, the newest ones."""
KEPT_BYTES = 64 << 20
"""What they take together, beside the newest: a state may hold a shuffle's whole buffer."""


def write_stream_state(folder: RunFolder, state: StreamState | None) -> None:
    """Adds the state with which a window begins.

    Raises:
        CannotWriteError: the folder cannot be written.
    """
    if state is None:
        return
    texts = [json.dumps(asdict(known)) for known in (*_states(folder), state)][-KEPT:]
    while len(texts) > 1 and sum(map(len, texts)) > KEPT_BYTES:
        texts.pop(0)
    with writing(folder.path / NAME):
        write_atomic(folder.path / NAME, f"[{', '.join(texts)}]")


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
    if not isinstance(value, dict) or not all(type(value.get(name)) is int and value[name] >= 0 for name in names):
        return False
    if value.get("state") is None:
        return True
    with contextlib.suppress(Exception):
        decode_alone(value["state"])
        return True
    return False
