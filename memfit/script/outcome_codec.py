"""What a traced process answers, as JSON and arrays: nothing in it can run when it is read.

The traced process runs a script that may do anything inside of its sandbox, and could write its own answer. So the
answer holds plain values, numpy arrays of numbers, and the dataclasses that are named here, checked by their fields.
"""

from __future__ import annotations

import io
import json
import zipfile
from dataclasses import fields, is_dataclass
from functools import cache
from typing import IO, Any

import numpy as np

from memfit.events import Trace
from memfit.footprint import Footprint, PeakLocation, PhaseFootprint, Request
from memfit.script import outcome

_LENGTH = 8
"""Bytes in front of an answer: how long it is."""
_LONGEST = 1 << 32


@cache
def _kinds() -> dict[str, type[Any]]:
    """The dataclasses that an answer may hold, by name."""
    of_outcome = [value for value in vars(outcome).values() if isinstance(value, type) and is_dataclass(value)]
    return {k.__name__: k for k in (Trace, Footprint, PeakLocation, PhaseFootprint, Request, *of_outcome)}


class AnswerError(ValueError):
    """What was read is no answer of a traced process."""


def write_answer(value: Any, file: IO[bytes]) -> None:
    """Appends a value: its length as 8 bytes, then an ``.npz`` of one JSON text and its arrays."""
    arrays: dict[str, np.ndarray] = {}
    tree = json.dumps(_encoded(value, arrays))
    buffer = io.BytesIO()
    np.savez(buffer, tree=np.array(tree), **arrays)  # type: ignore[arg-type]
    file.write(len(buffer.getvalue()).to_bytes(_LENGTH, "little") + buffer.getvalue())


def read_answer(file: IO[bytes]) -> Any:
    """The next value of a file.

    Raises:
        AnswerError: there is none, or it is not what ``write_answer`` writes.
    """
    length = int.from_bytes(file.read(_LENGTH), "little")
    content = file.read(length) if length <= _LONGEST else b""
    if not length or len(content) != length:
        raise AnswerError("the answer ends too early")
    try:
        with np.load(io.BytesIO(content), allow_pickle=False) as arrays:
            return _decoded(json.loads(str(arrays["tree"])), arrays)
    except (KeyError, TypeError, ValueError, RecursionError, zipfile.BadZipFile) as error:
        raise AnswerError(f"not an answer: {error}") from error


def _encoded(value: Any, arrays: dict[str, np.ndarray]) -> Any:
    if isinstance(value, np.ndarray):
        key = f"a{len(arrays)}"
        arrays[key] = value
        return {"array": key}
    if isinstance(value, np.generic):
        return value.item()
    if is_dataclass(value) and not isinstance(value, type):
        parts = {field.name: _encoded(getattr(value, field.name), arrays) for field in fields(value)}
        return {"kind": type(value).__name__, "fields": parts}
    if isinstance(value, tuple):
        return {"tuple": [_encoded(item, arrays) for item in value]}
    if isinstance(value, list):
        return [_encoded(item, arrays) for item in value]
    if isinstance(value, dict):
        return {"dict": [[_encoded(key, arrays), _encoded(item, arrays)] for key, item in value.items()]}
    if value is None or isinstance(value, str | int | float | bool):
        return value
    raise TypeError(f"an answer holds no {type(value).__name__}")


def _decoded(tree: Any, arrays: Any) -> Any:
    if isinstance(tree, list):
        return [_decoded(item, arrays) for item in tree]
    if not isinstance(tree, dict):
        return tree
    if "array" in tree:
        return arrays[tree["array"]]
    if "tuple" in tree:
        return tuple(_decoded(item, arrays) for item in tree["tuple"])
    if "dict" in tree:
        return {_decoded(key, arrays): _decoded(item, arrays) for key, item in tree["dict"]}
    return _kinds()[tree["kind"]](**{name: _decoded(item, arrays) for name, item in tree["fields"].items()})
