"""Scratch: what an operator allocates and frees within one call, which a trace cannot see. On a CPU it is measured.

Each distinct call (operator, shapes, strides, types) is really run once on this machine and its allocator events are
read; the answer is kept on disk, since it depends only on the torch build, the processor and the number of threads.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import platform
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from memfit.device.hardware.benchmarks import AllocatorEvents
from memfit.device.hardware.process_limits import available_bytes
from memfit.engine.collectives import is_memory_failure
from memfit.events import ALLOCATE, CATEGORIES, FREE, Trace
from memfit.nested_tensors import tensors_in
from memfit.torch_compat import disable_current_modes
from memfit.torch_compat.attributes import schema_of
from memfit.trace.collectives import is_collective
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
    if func.is_view or is_collective(func):
        return False
    tensors = [tensor for tensor in args if isinstance(tensor, Tensor)]
    if not tensors:
        return False
    first = tensors[0]
    agree = all(
        tensor.dtype is first.dtype and tensor.shape == first.shape and tensor.is_contiguous() for tensor in tensors
    )
    return not (agree and torch.Tag.pointwise in func.tags)


def call_key(func: Any, args: Any, kwargs: Any) -> Key | None:
    """A call as text from which it can be made again; None where it holds more than tensors and numbers, and where
    other ranks would have to take part."""
    if is_collective(func):
        return None
    try:
        return json.dumps(
            [str(func), [_value(value) for value in args], {name: _value(value) for name, value in kwargs.items()}]
        )
    except TypeError:
        return None


def with_scratch(trace: Trace, calls: Iterable[Call], estimates: Mapping[Key, int] | None = None) -> Trace:
    """The trace with each measured call's scratch, allocated when its outputs are there and freed at once.

    Args:
        estimates: bytes of calls that are not measured.
    """
    wanted = [call for call in calls if call[0] <= len(trace.kind)]
    estimated = dict(estimates or {})
    sizes, too_large = measure({key for _, _, key in wanted if isinstance(key, str)} - estimated.keys())
    sizes |= estimated
    failed = {json.loads(key)[0] for key, nbytes in sizes.items() if nbytes is None}
    large = {json.loads(key)[0] for key in too_large}
    unknown = [*map(_FAILED.format, sorted(failed)), *map(_TOO_LARGE.format, sorted(large))]
    if unknown:
        trace = replace(trace, assumed=(*trace.assumed, *unknown))
    measured = [(position, row, sizes.get(key) if isinstance(key, str) else key) for position, row, key in wanted]
    extra = [(position, row, nbytes) for position, row, nbytes in measured if nbytes]
    if not extra:
        return trace
    first, count = len(trace.nbytes), len(extra)
    positions = np.repeat([position for position, _, _ in extra], 2)
    storages = np.repeat(np.arange(first, first + count), 2)
    rows = [row for _, row, _ in extra]

    def moved(position: int, *, end: bool) -> int:
        return position + 2 * int(np.searchsorted(positions[::2], position, side="left" if not end else "right"))

    return replace(
        trace,
        kind=np.insert(trace.kind, positions, np.tile([ALLOCATE, FREE], count)),
        storage=np.insert(trace.storage, positions, storages),
        operator=np.insert(trace.operator, positions, np.repeat(rows, 2)),
        nbytes=np.concatenate([trace.nbytes, [nbytes for _, _, nbytes in extra]]),
        category=np.concatenate([trace.category, np.full(count, CATEGORIES.index("workspace"), np.uint8)]),
        stream=np.concatenate([trace.stream, np.zeros(count, np.uint8)]),
        made_by=np.concatenate([trace.made_by, np.array(rows, np.int32)]),
        phases=tuple((name, moved(start, end=False), moved(stop, end=True)) for name, start, stop in trace.phases),
    )


_FAILED = "{} fails on made-up numbers, so what it allocates within a call is unknown and not counted"
_TOO_LARGE = "{} is too large to run on this machine, so what it allocates within a call is unknown and not counted"


def measure(keys: set[Key]) -> tuple[dict[Key, int | None], set[Key]]:
    """(scratch bytes of calls, from the disk where they were measured before, None of those that fail here; calls that
    this machine's memory does not hold)."""
    place = store("scratch-2")
    known: dict[Key, int | None] = read_kept(place, lambda value: value is None or is_count(value))
    missing = sorted(key for key in keys - known.keys() if fits_here(key))
    if missing:
        known |= _measure_really(missing)
        with contextlib.suppress(OSError):
            keep(place, known)
    return {key: known[key] for key in keys & known.keys()}, keys - known.keys()


def fits_here(key: Key) -> bool:
    """Whether the memory that is free holds a call: its arguments and results, and as much again for what it allocates
    within."""
    name, args, kwargs = json.loads(key)
    arguments = [_made(value, "meta") for value in args]
    named = {word: _made(value, "meta") for word, value in kwargs.items()}
    results = None
    with contextlib.suppress(Exception), disable_current_modes():  # an operator that gives no shapes without numbers
        results = traced_operator(name)(*arguments, **named)
    return 2 * sum(tensor.nbytes for tensor in tensors_in([arguments, named, results])) <= available_bytes()


def _measure_really(keys: list[Key]) -> dict[Key, int | None]:
    failed: set[Key] = set()
    too_large: set[Key] = set()
    with disable_current_modes(), torch.no_grad(), AllocatorEvents() as events:
        before = torch.default_generator.get_state()
        for number, key in enumerate(keys):
            name, args, kwargs = json.loads(key)
            tensors, named, out = None, None, None
            try:
                tensors = [real(value) for value in args]
                named = {word: real(value) for word, value in kwargs.items()}
                with events.phase(str(number)):
                    out = traced_operator(name)(*tensors, **named)
            except Exception as error:
                (too_large if is_memory_failure(error) else failed).add(key)
            del tensors, named, out
        torch.default_generator.set_state(before)
    scratch = events.scratch()
    return {
        key: None if key in failed else scratch[str(number)] for number, key in enumerate(keys) if key not in too_large
    }


def traced_operator(name: str) -> Any:
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
    made = _made(value, "cpu")
    for tensor in tensors_in(made):
        tensor.fill_(0.5 if tensor.is_floating_point() else tensor.dtype is torch.bool)
    return made


def _made(value: Any, device: str) -> Any:
    """An argument made again from its description, its tensors uninitialized on a device."""
    if isinstance(value, dict) and "tensor" in value:
        shape, stride, dtype = value["tensor"]
        return torch.empty_strided(shape, stride, dtype=getattr(torch, dtype), device=device)
    if isinstance(value, dict):
        return getattr(torch, value["dtype"])
    if isinstance(value, list):
        return [_made(item, device) for item in value]
    return value


def store(what: str) -> str:
    """The kept file of what was measured on this processor, with this build of torch and so many threads."""
    build = (torch.__version__, torch.backends.cpu.get_cpu_capability(), torch.get_num_threads())
    machine = (platform.processor(), platform.machine())
    name = hashlib.sha256(repr((build, machine)).encode()).hexdigest()[:16]
    return f"{what}-{name}.json"
