"""Variables of the script that keep card memory alive: during a backward that does not need it, and between steps."""

from __future__ import annotations

import dis
import re
from collections.abc import Iterator
from dataclasses import dataclass
from types import FrameType
from typing import Any

from torch import Tensor

from memfit.frame_variables import frame_variables
from memfit.script.outcome import KeptVariable
from memfit.script.source_lines import own_frames
from memfit.script.tracer import ScriptTracer
from memfit.torch_compat import storage_use_count
from memfit.torch_compat.attributes import storage_id, use_count

LEAST_BYTES = 1 << 16
_STATE = frozenset({"parameters", "gradients", "optimizer", "buffers", "frozen", "ema"})
_MOST_ITEMS = 64


@dataclass(frozen=True, kw_only=True)
class HeldVariable:
    """A variable that is the only reference to a storage when a backward begins."""

    name: str
    file: str
    line: int
    """The line that calls the backward."""
    storage: int
    event: int
    """The number of events when that backward began."""


def _tensors(value: Any, name: str, depth: int = 2) -> Iterator[tuple[str, Tensor]]:
    kind = type(value)  # not its class, which an object of the user's own may answer as it likes
    if issubclass(kind, Tensor):
        yield name, value
    elif depth and issubclass(kind, dict) and len(value) <= _MOST_ITEMS:
        for key, item in list(value.items()):
            yield from _tensors(item, f"{name}[{key!r}]", depth - 1)
    elif depth and issubclass(kind, list | tuple) and len(value) <= _MOST_ITEMS:
        for number, item in enumerate(value):
            yield from _tensors(item, f"{name}[{number}]", depth - 1)


def _storages(tracer: ScriptTracer) -> Iterator[tuple[str, FrameType, Tensor, int]]:
    """Yields (variable, its frame, tensor, storage) of the user's frames, each storage once."""
    seen: set[int] = set()
    for frame in own_frames(tracer.lines):
        for name, value in frame_variables(frame).items():
            if name.startswith("__"):
                continue
            for path, tensor in _tensors(value, name):
                storage = tracer.recorded_number(tensor)
                if storage is None or storage in seen or tracer.nbytes[storage] < LEAST_BYTES:
                    continue
                seen.add(storage)
                yield path, frame, tensor, storage


def held_at_backward(tracer: ScriptTracer) -> list[HeldVariable]:
    """Variables whose storage neither the graph nor later code needs: nothing else refers to it."""
    held = []
    for name, frame, tensor, storage in _storages(tracer):
        if tracer.category[storage] in _STATE or tensor.grad_fn is None:
            continue
        variable = re.split(r"[\[.]", name)[0]
        if _is_only_a_variable(tensor) and not is_read_later(frame, variable) and not _is_read_here(frame, variable):
            file, line = frame.f_code.co_filename, frame.f_lineno
            held.append(HeldVariable(name=name, file=file, line=line, storage=storage, event=len(tracer.kind)))
    return held


def is_read_later(frame: FrameType, name: str) -> bool:
    """Whether the frame's code reads a variable after the present instruction, before it assigns to it.

    The code is scanned from top to bottom. A variable that inner functions read counts as read.
    """
    if name in frame.f_code.co_cellvars:
        return True
    for instruction in dis.get_instructions(frame.f_code):
        if instruction.offset <= frame.f_lasti or instruction.argval != name:
            continue
        kind = instruction.opname.partition("_")[0]
        if kind in ("LOAD", "STORE", "DELETE"):
            return kind == "LOAD"
    return False


def _is_read_here(frame: FrameType, name: str) -> bool:
    """Whether the line that runs now has read a variable: ``loss(net(name)).backward()``. It cannot be deleted
    before that line.
    """
    starts = dict(dis.findlinestarts(frame.f_code))
    line = frame.f_code.co_firstlineno
    for instruction in dis.get_instructions(frame.f_code):
        line = starts.get(instruction.offset) or line
        if instruction.offset > frame.f_lasti:
            return False
        if line == frame.f_lineno and instruction.argval == name and instruction.opname.startswith("LOAD"):
            return True
    return False


def _is_only_a_variable(tensor: Tensor) -> bool:
    """Whether no node of the graph saved the tensor (which would be one more reference to it) or its content (one more
    reference to its storage, besides those of the tensor and of this function).
    """
    storage = tensor.untyped_storage()
    return bool(use_count(tensor) == 1 and storage_use_count(storage_id(storage)) == 2)


def kept_between_steps(tracer: ScriptTracer) -> tuple[KeptVariable, ...]:
    """What variables keep when a step is over, the largest first, without weights and state."""
    kept = []
    for name, _, _, storage in _storages(tracer):
        if tracer.category[storage] not in _STATE:
            line = tracer.line_of(storage)
            kept.append(KeptVariable(name=name, file=line.file, line=line.line, bytes=tracer.nbytes[storage]))
    return tuple(sorted(kept, key=lambda variable: -variable.bytes))
