"""What forwards carry from window to window outside of trained nets, optimizers and buffers, for a checkpoint.

A recurrent net that keeps its hidden state in an attribute, a job with a running centre, a loss that moves a frozen
net. ``CarriedState`` notes how attributes and frozen nets begin; a checkpoint holds those that are no longer so. Kept
are the attributes of a job and of modules that are not torch's own: numbers, text, tensors, arrays, generators of
random numbers, and lists, tuples, dicts, sets and deques of these, up to ``MOST_BYTES`` of tensors together. Of larger
tensors and of tensors with a graph the name alone is given, where they change. Nothing is known of attributes of other
objects and of classes, of globals, and of writes to frozen nets through ``.data``.
"""

from __future__ import annotations

import collections
import hashlib
import itertools
import random
import weakref
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from memfit.apply.attribute_snapshot import GENERATORS, MOST_BYTES, MOST_ENTRIES, OF_MODULES, has_own_code
from memfit.apply.train_state import TrainState
from memfit.job import is_trained
from memfit.torch_compat.attributes import storage_id_of, version_of

_PLAIN = (type(None), bool, int, float, complex, torch.dtype, torch.device)
_BOXES = (list, tuple, set, frozenset, collections.deque)
_DICTS = (dict, collections.OrderedDict, collections.Counter)
_BIT_GENERATORS = ("MT19937", "PCG64", "PCG64DXSM", "Philox", "SFC64")
_JOB = ""
"""The key of a job's own attributes; those of modules have the module's name."""

Coded = dict[str, Any]


class _NotKeptError(ValueError):
    """A value that a checkpoint does not hold; ``mark`` changes with it as far as that can be seen."""

    def __init__(self, why: str, mark: Any) -> None:
        super().__init__(why)
        self.mark = mark


class _Seen:
    """A tensor as it was seen: another one, or a later version, is another value."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor, self.version = weakref.ref(tensor), version_of(tensor)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, _Seen) or self.version != other.version:
            return False
        return self.tensor() is not None and self.tensor() is other.tensor()

    __hash__ = None  # type: ignore[assignment]


class CarriedState:
    """What was changed since this was made."""

    def __init__(self, train_state: TrainState) -> None:
        self._state = train_state
        self._begin = {(key, name): _mark(value) for key, name, value in self._attributes()}
        self._frozen = {name: version_of(parameter) for name, parameter in _frozen(train_state)}
        self.kept: list[str] = []
        """Names of attributes that have changed, as ``changed`` saw it last."""
        self.frozen: list[str] = []
        """Names of the parameters of frozen nets that have changed."""
        self.not_kept: list[str] = []
        """Attributes that are in no checkpoint, with why."""

    def changed(self) -> Coded:
        """What is to be kept, with tensors that are the train state's own; empty where nothing has changed."""
        left, attributes, own = MOST_BYTES, dict[str, Coded](), _own_storages(self._state)
        self.kept, self.not_kept = [], []
        for key, name, value in self._attributes():
            try:
                if _mark(value) == self._begin.get((key, name)):
                    continue
                coded, nbytes = _coded(value, left, own)
            except _NotKeptError as error:
                self.not_kept.append(f"{key or type(self._state.job).__name__}.{name} ({error})")
                continue
            self.kept.append(f"{key or type(self._state.job).__name__}.{name}")
            left -= nbytes
            attributes.setdefault(key, {})[name] = coded
        frozen = {name: p.detach() for name, p in _frozen(self._state) if version_of(p) != self._frozen.get(name)}
        self.frozen = list(frozen)
        parts = {"attributes": attributes, "frozen": frozen}
        return {part: values for part, values in parts.items() if values}

    def notes(self, *, in_parts: bool) -> Iterator[str]:
        """Lines about what a resumed run does not go on with as it was, as ``changed`` saw it last.

        Args:
            in_parts: whether checkpoints are in parts, which hold nothing of this.
        """
        lost = [*self.kept, *self.frozen, *self.not_kept] if in_parts else self.not_kept
        if lost:
            write = "write --engine ddp, whose checkpoints hold what rank 0 keeps"
            yield (
                f"checkpoints do not hold {_listed(lost)}, which forwards change: a resumed run is not the same bit "
                f"for bit; {write if in_parts else 'make it a buffer of a trained net'}"
            )
        elif self.kept and self._state.engine.world > 1:
            yield (
                f"checkpoints hold what rank 0 keeps in {_listed(self.kept)}, and a resumed run gives it to all ranks: "
                "it is the same bit for bit only where all ranks keep the same"
            )

    def _attributes(self) -> Iterator[tuple[str, str, Any]]:
        for key, owner in _owners(self._state):
            skipped = OF_MODULES if key != _JOB else frozenset()
            yield from ((key, name, value) for name, value in list(vars(owner).items()) if name not in skipped)


def put_carried(train_state: TrainState, carried: Mapping[str, Any]) -> None:
    """Gives attributes and frozen nets what ``CarriedState.changed`` gave.

    Raises:
        ValueError: the job has no such module, or no such parameter.
    """
    owners, frozen, own = dict(_owners(train_state)), dict(_frozen(train_state)), _own_storages(train_state)
    for key, values in carried.get("attributes", {}).items():
        if key not in owners:
            raise ValueError(f"it has attributes of {key}, which the job has not")
        box = vars(owners[key])
        for name, coded in values.items():
            box[name] = _put(box.get(name), coded, own)
    for name, value in carried.get("frozen", {}).items():
        if name not in frozen or frozen[name].shape != value.shape:
            raise ValueError(f"it has a frozen parameter {name} of {tuple(value.shape)}, which the job has not")
        with torch.no_grad():
            frozen[name].copy_(value)


def _listed(names: list[str], most: int = 4) -> str:
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def _owners(train_state: TrainState) -> Iterator[tuple[str, Any]]:
    """The job, and the modules whose attributes are looked at, by name."""
    yield _JOB, train_state.job
    for name, net in train_state.nets.items():
        for path, module in net.named_modules():
            if has_own_code(module):
                yield f"{name}.{path}".rstrip("."), module


def _frozen(train_state: TrainState) -> Iterator[tuple[str, Tensor]]:
    """The parameters of nets that are not trained, whose checkpoints hold buffers alone."""
    for name, net in train_state.nets.items():
        if not is_trained(net):
            yield from ((f"{name}.{path}", parameter) for path, parameter in net.named_parameters())


def _mark(value: Any) -> Any:
    """What is another where a value has changed; None of what nothing is known of."""
    try:
        coded, _ = _coded(value, MOST_BYTES, frozenset())
    except _NotKeptError as error:
        return error.mark
    digest, tensors = hashlib.blake2b(digest_size=16), list[_Seen]()
    state = coded.get("state")
    _feed({"state": state.numpy()} if isinstance(state, Tensor) else coded, digest, tensors)
    return digest.digest(), tensors


def _coded(value: Any, left: int, own: set[int] | frozenset[int]) -> tuple[Coded, int]:
    """A value of an attribute as a checkpoint holds it, and the bytes of its tensors.

    Raises:
        _NotKeptError: a checkpoint does not hold it.
    """
    for kind, (read, _) in GENERATORS.items():
        if type(value) is kind:
            return {"generator": kind.__name__, "state": read(value)}, 0
    nbytes = _check(value, left, own, entries=[MOST_ENTRIES])
    if type(value) is collections.deque:
        return {"deque": list(value), "longest": value.maxlen}, nbytes
    return {"value": value}, nbytes


def _check(value: Any, left: int, own: set[int] | frozenset[int], entries: list[int]) -> int:
    """Bytes of the tensors in a value.

    Raises:
        _NotKeptError: there is something in it that a checkpoint does not hold.
    """
    kind = type(value)
    if kind in (str, bytes):
        return _within(len(value), left, mark=("length", len(value)))
    if kind in _PLAIN or (isinstance(value, np.generic) and value.dtype.kind in "biufc"):
        return 0
    if kind is np.ndarray and value.dtype.kind in "biufc":
        return _within(value.nbytes, left, mark=None)
    if kind in (*_BOXES, *_DICTS):
        entries[0] -= len(value)
        if entries[0] < 0:
            raise _NotKeptError(f"more than {MOST_ENTRIES} entries", ("entries", len(value)))
        parts = [*value.keys(), *value.values()] if kind in _DICTS else value
        nbytes = 0
        for part in parts:
            nbytes += _check(part, left - nbytes, own, entries)
        return nbytes
    if kind is not Tensor:
        raise _NotKeptError(f"a {kind.__name__}", None)
    mark = _Seen(value)
    if value.requires_grad:
        raise _NotKeptError("a tensor with a graph", mark)
    if value.layout is not torch.strided or value.is_quantized or value.is_meta:
        raise _NotKeptError("no plain tensor", mark)
    if storage_id_of(value) in own:
        raise _NotKeptError("a view of a parameter or a buffer", mark)
    return _within(value.nbytes, left, mark)


def _within(nbytes: int, left: int, mark: Any) -> int:
    if nbytes > left:
        raise _NotKeptError(f"more than {MOST_BYTES >> 20} MiB with the others", mark)
    return nbytes


def _feed(value: Any, digest: Any, tensors: list[_Seen]) -> None:
    """Feeds a value to the digest, and adds its tensors to the list: their content is not read."""
    if isinstance(value, Tensor):
        tensors.append(_Seen(value))
        digest.update(b"tensor;")
    elif isinstance(value, np.ndarray):
        digest.update(f"{value.dtype} {value.shape}".encode() + value.tobytes())
    elif isinstance(value, set | frozenset):
        digest.update(repr(sorted(map(repr, value))).encode())
    elif isinstance(value, (*_BOXES, *_DICTS)):
        digest.update(f"{type(value).__name__} {len(value)};".encode())
        for entry in itertools.chain.from_iterable(value.items()) if isinstance(value, _DICTS) else value:
            _feed(entry, digest, tensors)
    else:
        digest.update(repr(value).encode() + b";")


def _put(present: Any, coded: Coded, own: set[int]) -> Any:
    """The value of an attribute again: the present object with the old contents where it is of the same kind."""
    if "generator" in coded:
        generator = present if type(present).__name__ == coded["generator"] else _new_generator(coded)
        GENERATORS[type(generator)][1](generator, coded["state"])
        return generator
    if "deque" in coded:
        return collections.deque(coded["deque"], coded["longest"])
    value = coded["value"]
    if type(present) is not type(value):
        return value
    if isinstance(value, Tensor):
        same = present.shape == value.shape and present.dtype == value.dtype and present.device == value.device
        plain = present.layout is torch.strided and present.is_contiguous()
        fits = same and plain and storage_id_of(present) not in own
        if fits:
            present.data.copy_(value)
        return present if fits else value
    if isinstance(value, dict | set):
        present.clear()
        present.update(value)
        return present
    if isinstance(value, list):
        present[:] = value
        return present
    return value


def _own_storages(train_state: TrainState) -> set[int]:
    """Of parameters and buffers: a tensor that shares one is a view of what is kept already."""
    nets = train_state.nets.values()
    tensors = (tensor for net in nets for tensor in (*net.parameters(), *net.buffers()))
    return {storage_id_of(tensor) for tensor in tensors if tensor.layout is torch.strided}


def _new_generator(coded: Coded) -> Any:
    if coded["generator"] == "Generator" and isinstance(coded["state"], Tensor):
        return torch.Generator()
    if coded["generator"] == "Generator" and coded["state"]["bit_generator"] in _BIT_GENERATORS:
        return np.random.Generator(getattr(np.random, coded["state"]["bit_generator"])())
    return random.Random() if coded["generator"] == "Random" else np.random.RandomState()
