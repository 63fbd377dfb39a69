"""Scratch: what an operator allocates and frees within one call, which a trace cannot see. On a CPU it is measured.

Each distinct call (operator, shapes, strides, types) is really run once on this machine and its allocator events are
read; the answer is kept on disk, since it depends only on the torch build, the processor and the number of threads.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import platform
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from memfit.device.hardware.benchmarks import AllocatorEvents
from memfit.events import ALLOCATE, CATEGORIES, FREE, Trace
from memfit.torch_compat import disable_current_modes
from memfit.torch_compat.attributes import schema_of
from memfit.trace.collectives import communicates
from memfit.user_cache import is_count, keep, read_kept

Key = str
Call = tuple[int, int, Key | int]
"""Event after a call's outputs, its operator, and its scratch in bytes, or its description where that is measured."""


def may_have(func: Any, args: Any) -> bool:
    """Whether a call is worth measuring: no view, no list of tensors, no pointwise work on tensors that agree, no
    communication."""
    name = schema_of(func).name
    if name == "fsdp::chunk_cat":
        return True
    if name.startswith(("aten::_foreach", "aten::empty", "aten::detach", "prim::")):
        return False
    if func.is_view or communicates(func):
        return False
    tensors = [tensor for tensor in args if isinstance(tensor, Tensor)]
    if not tensors:
        return False
    first = tensors[0]
    agree = all(
        tensor.dtype is first.dtype and tensor.shape == first.shape and tensor.is_contiguous() for tensor in tensors
    )
    return not (agree and torch.Tag.pointwise in func.tags)


def describe(func: Any, args: Any, kwargs: Any) -> Key | None:
    """A call as text from which it can be made again; None where it holds more than tensors and numbers, and where
    other ranks would have to take part."""
    if communicates(func):
        return None
    try:
        return json.dumps(
            [str(func), [_value(value) for value in args], {name: _value(value) for name, value in kwargs.items()}]
        )
    except TypeError:
        return None


def with_scratch(trace: Trace, calls: Iterable[Call]) -> Trace:
    """The trace with each measured call's scratch, allocated when its outputs are there and freed at once."""
    wanted = [call for call in calls if call[0] <= len(trace.kind)]
    sizes = measure({key for _, _, key in wanted if isinstance(key, str)})
    unknown = sorted({json.loads(key)[0] for key, nbytes in sizes.items() if nbytes is None})
    if unknown:
        trace = replace(trace, assumed=(*trace.assumed, *map(_UNKNOWN.format, unknown)))
    measured = [(position, row, sizes[key] if isinstance(key, str) else key) for position, row, key in wanted]
    extra = [(position, row, nbytes) for position, row, nbytes in measured if nbytes]
    if not extra:
        return trace
    first, count = len(trace.nbytes), len(extra)
    positions = np.repeat([position for position, _, _ in extra], 2)
    storages = np.repeat(np.arange(first, first + count), 2)
    rows = [row for _, row, _ in extra]

    def moved(position: int, *, end: bool) -> int:
        return position + 2 * int(np.searchsorted(positions[::2], position, side="left" if not end else "right"))

    return Trace(
        kind=np.insert(trace.kind, positions, np.tile([ALLOCATE, FREE], count)),
        storage=np.insert(trace.storage, positions, storages),
        operator=np.insert(trace.operator, positions, np.repeat(rows, 2)),
        nbytes=np.concatenate([trace.nbytes, [nbytes for _, _, nbytes in extra]]),
        category=np.concatenate([trace.category, np.full(count, CATEGORIES.index("workspace"), np.uint8)]),
        stream=np.concatenate([trace.stream, np.zeros(count, np.uint8)]),
        made_by=np.concatenate([trace.made_by, np.array(rows, np.int32)]),
        operator_name=trace.operator_name, operator_module=trace.operator_module, operator_part=trace.operator_part,
        operator_flops=trace.operator_flops, operator_bytes=trace.operator_bytes,
        names=trace.names, modules=trace.modules, parts=trace.parts, net_kind=trace.net_kind, assumed=trace.assumed,
        phases=tuple((name, moved(start, end=False), moved(stop, end=True)) for name, start, stop in trace.phases),
    )  # fmt: skip


_UNKNOWN = "{} fails on made-up numbers, so what it allocates within a call is unknown and not counted"


def measure(keys: set[Key]) -> dict[Key, int | None]:
    """Scratch bytes of calls, from the disk where they were measured before; None of those that cannot be run here."""
    place = store("scratch-2")
    known: dict[Key, int | None] = read_kept(place, lambda value: value is None or is_count(value))
    missing = sorted(keys - known.keys())
    if missing:
        known |= _measure_really(missing)
        with contextlib.suppress(OSError):
            keep(place, known)
    return {key: known[key] for key in keys}


def _measure_really(keys: list[Key]) -> dict[Key, int | None]:
    failed = set()
    with disable_current_modes(), torch.no_grad(), AllocatorEvents() as events:
        before = torch.default_generator.get_state()
        for number, key in enumerate(keys):
            name, args, kwargs = json.loads(key)
            tensors = [real(value) for value in args]
            named = {key_: real(value) for key_, value in kwargs.items()}
            out = None
            with events.phase(str(number)):
                try:
                    out = operator(name)(*tensors, **named)
                except Exception:
                    failed.add(key)
            del tensors, named, out
        torch.default_generator.set_state(before)
    scratch = events.scratch()
    return {key: None if key in failed else scratch[str(number)] for number, key in enumerate(keys)}


def operator(name: str) -> Any:
    """The operator that a trace calls ``aten.mm.default``."""
    attribute: Any = torch.ops
    for part in name.split("."):
        attribute = getattr(attribute, part)
    return attribute


def _value(value: Any) -> Any:
    if isinstance(value, Tensor):
        return {"tensor": [list(value.shape), list(value.stride()), str(value.dtype).removeprefix("torch.")]}
    if isinstance(value, list | tuple):
        return [_value(item) for item in value]
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, torch.dtype):
        return {"dtype": str(value).removeprefix("torch.")}
    raise TypeError


def real(value: Any) -> Any:
    """An argument made again from its description; a tensor holds halves or zeros, and a mask selects everything."""
    if isinstance(value, dict) and "tensor" in value:
        shape, stride, dtype = value["tensor"]
        made = torch.empty_strided(shape, stride, dtype=getattr(torch, dtype))
        if made.is_floating_point():
            return made.fill_(0.5)
        return made.fill_(made.dtype is torch.bool)
    if isinstance(value, dict):
        return getattr(torch, value["dtype"])
    if isinstance(value, list):
        return [real(item) for item in value]
    return value


def store(what: str) -> str:
    """The kept file of what was measured on this processor, with this build of torch and so many threads."""
    build = (torch.__version__, torch.backends.cpu.get_cpu_capability(), torch.get_num_threads())
    machine = (platform.processor(), platform.machine())
    name = hashlib.sha256(repr((build, machine)).encode()).hexdigest()[:16]
    return f"{what}-{name}.json"
