"""The events of one device as they happen, and the life of each storage from its first tensor to its last reference."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from memfit.device.virtual import backend
from memfit.errors import InputError
from memfit.events import ALLOCATE, FREE
from memfit.torch_compat import FakeTensor
from memfit.torch_compat.attributes import (
    inner_tensors,
    is_recorded_sparse,
    is_zero_tensor,
    sparse_parts,
    storage_id,
    storage_id_of,
    stored_parts,
)
from memfit.trace.event_limit import TooManyEventsError, event_limit
from memfit.trace.sparse_parts import note_sparse, without_rule

_left: dict[int, weakref.ref[Any]] = {}
"""Storages by their keys that were there when the record of them ended."""


class EventListener(Protocol):
    """An allocator that sees each event as it happens. ``malloc`` may raise; the storage is then not recorded."""

    def malloc(self, storage: int, nbytes: int, stream: int = 0) -> None: ...
    def free(self, storage: int) -> None: ...
    def empty_cache(self) -> None: ...


class EventRecord:
    """Lists of events, storages and operators, as a ``Trace`` has them.

    A storage is allocated when ``see`` gets its first tensor, and freed when its last reference goes: fake tensors live
    in the same autograd graph, Python frames and optimizers as real ones would.
    """

    def __init__(self, device_type: str) -> None:
        self.device_type = device_type
        self.kind: list[int] = []
        self.storage: list[int] = []
        self.operator: list[int] = []
        self.nbytes: list[int] = []
        self.category: list[str | None] = []
        self.stream: list[int] = []
        self.made_by: list[int] = []
        self.op_rows: list[tuple[str, int, str, int, int]] = []
        self.phases: list[tuple[str, int, int]] = []
        self.marks: list[tuple[int, str]] = []
        self.part = "setup"
        self.live: EventListener | None = None
        """Called with every event as it happens, for code that asks how much memory is allocated."""
        self._most_events = event_limit()
        self._ids: dict[int, int] = {}
        self._keys: dict[int, int] = {}
        self._refs: dict[weakref.ref[Any], int] = {}
        self._earlier: dict[int, weakref.ref[Any]] = {}
        """By their keys, storages of earlier records that were there when this one began."""
        self._shared: dict[int, dict[weakref.ref[Any] | None, int]] = {}
        """Of memory that several storages stand for, the key of each by its reference; that of the first by None."""

    @property
    def last_row(self) -> int:
        """The number of the last operator; 0 before the first one."""
        return max(len(self.op_rows) - 1, 0)

    def look_back(self) -> None:
        """Notes which storages of earlier records are still there."""
        _forget_gone()
        self._earlier = dict(_left)

    def look_ahead(self) -> None:
        """Notes which of its storages are still there, for later records."""
        _left.update(
            {storage_id(storage): weakref.ref(storage) for ref in self._refs if (storage := ref()) is not None}
        )

    def see_earlier(self, values: Iterable[object], row: int) -> bool:
        """Records storages of earlier records that operator ``row`` is given; returns whether there are such.

        Code that makes a tensor once, in its module's variables, made it in an earlier trace of this process, and would
        make it now in a process of its own.
        """
        seen = False
        for value in values:
            if isinstance(value, tuple | list):
                seen |= self.see_earlier(value, row)
            elif isinstance(value, Tensor):
                for part in stored_parts(value):
                    ref = self._earlier.get(storage_id_of(part))
                    if ref is not None and ref() is not None:
                        seen |= self.see(part, row)
        return seen

    def mark(self, part: str) -> None:
        """Begins a part of the window. At ``backward``, what the forward left alive becomes activations."""
        if part == "backward":
            for i in self._refs.values():
                if self.category[i] is None and self.made_in(i) == "forward":
                    self.category[i] = "activations"
        self.marks.append((len(self.kind), part))
        self.part = part

    def made_in(self, storage: int) -> str:
        """The part of a window in which a storage was made."""
        return self.op_rows[self.made_by[storage]][2]

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Context whose events belong to this phase."""
        start = len(self.kind)
        yield
        self.phases.append((name, start, len(self.kind)))

    def categorise(self, tensor: Tensor, category: str) -> None:
        """Says what the storage of a tensor holds, or those of the tensors that it holds."""
        for inner in inner_tensors(tensor):
            i = self.number_of(inner)
            if i is not None:
                self.category[i] = category

    def number_of(self, tensor: Tensor) -> int | None:
        """The number of a tensor's storage; None if it was not recorded."""
        return self._ids.get(storage_id_of(tensor))

    def see(self, tensor: Tensor, row: int) -> bool:
        """Records the storage of a tensor that operator ``row`` returned; returns whether it is new.

        Raises:
            InputError: the tensor has no storage, or the trace has more events than ``most_events`` allows.
        """
        if tensor.layout is torch.sparse_coo and is_recorded_sparse(tensor):
            note_sparse()
            seen = [self.see(part, row) for part in sparse_parts(tensor)]
            return any(seen)
        try:
            storage = tensor.untyped_storage()
        except NotImplementedError as error:
            raise without_storage(tensor) from error
        key = storage_id(storage)
        if key in self._ids:
            return False
        device = tensor.fake_device if type(tensor) is FakeTensor else tensor.device
        if device.type != self.device_type or is_zero_tensor(tensor):
            return False
        if len(self.kind) >= self._most_events:
            raise TooManyEventsError(self._most_events)
        i = self.new_storage(storage.nbytes(), None, row)
        if self.live is not None:
            self.live.malloc(i, self.nbytes[i], self.stream[i])
        self._ids[key], self._keys[i] = i, key
        self._refs[weakref.ref(storage, self._gone)] = i
        self.kind.append(ALLOCATE)
        self.storage.append(i)
        self.operator.append(row)
        return True

    def share(self, tensor: Tensor, other: Tensor) -> bool:
        """Lets the storage of ``tensor`` stand for that of ``other``, whose memory is freed when both are gone.

        Returns:
            Whether the storage of ``other`` was recorded.
        """
        i = self.number_of(other)
        if i is None:
            return False
        storage = tensor.untyped_storage()
        key, ref = storage_id(storage), weakref.ref(storage, self._gone)
        self._shared.setdefault(i, {None: self._keys[i]})[ref] = key
        self._ids[key] = self._refs[ref] = i
        return True

    def _gone(self, ref: weakref.ref[Any]) -> None:
        i = self._refs.pop(ref)
        others = self._shared.get(i)
        if others is None:
            del self._ids[self._keys.pop(i)]
            if self.live is not None:
                self.live.free(i)
            self.kind.append(FREE)
            self.storage.append(i)
            self.operator.append(max(len(self.op_rows) - 1, 0))
            return
        del self._ids[others.pop(ref if ref in others else None)]
        if others:
            self._keys[i] = next(iter(others.values()))
        else:
            del self._shared[i], self._keys[i]
            self.event(FREE, i)

    def resized(self, storage: torch.UntypedStorage, nbytes: int) -> None:
        """Records a storage whose size changes as two: the old one is freed, and one of the new size is allocated."""
        old = self._ids.get(storage_id(storage))
        if old is None or self.nbytes[old] == nbytes:
            return
        new = self.new_storage(nbytes, self.category[old], self.last_row)
        self.event(FREE, old)
        self.event(ALLOCATE, new)
        self._ids[storage_id(storage)] = new
        self._keys[new] = self._keys.pop(old)
        if old in self._shared:
            self._shared[new] = self._shared.pop(old)
        for ref, i in self._refs.items():
            if i == old:
                self._refs[ref] = new

    def new_storage(self, nbytes: int, category: str | None, row: int) -> int:
        """Returns the number of a new storage on the current stream. Its allocation is an ``event`` of its own."""
        self.nbytes.append(nbytes)
        self.category.append(category)
        self.stream.append(backend.current_stream().stream_id)
        self.made_by.append(row)
        return len(self.nbytes) - 1

    def event(self, kind: int, storage: int, row: int | None = None) -> None:
        """Records an event, by default of the last operator."""
        if self.live is not None:
            if kind == ALLOCATE:
                self.live.malloc(storage, self.nbytes[storage], self.stream[storage])
            elif kind == FREE:
                self.live.free(storage)
            else:
                self.live.empty_cache()
        self.kind.append(kind)
        self.storage.append(storage)
        self.operator.append(self.last_row if row is None else row)


def are_storages_left() -> bool:
    """Whether storages of earlier records are still there, garbage aside."""
    _forget_gone()
    if _left:
        gc.collect()
        _forget_gone()
    return bool(_left)


def let_stay(nets: Iterable[nn.Module]) -> None:
    """Lets nets of a record stay without being storages that it has left: memfit keeps them, not the job's code."""
    for net in nets:
        for tensor in (*net.parameters(), *net.buffers()):
            for inner in inner_tensors(tensor):
                for part in stored_parts(inner):
                    _left.pop(storage_id_of(part), None)


def _forget_gone() -> None:
    for key in [key for key, ref in _left.items() if ref() is None]:
        del _left[key]


def without_storage(tensor: Tensor) -> InputError:
    """The error of a tensor that is not dense, and no COO tensor whose parts are recorded."""
    return without_rule(f"a tensor of layout {str(tensor.layout).removeprefix('torch.')}")
