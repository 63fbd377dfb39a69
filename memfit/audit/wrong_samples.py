"""Data sets that give another sample than was asked for, seen by reading some samples.

Two signs are taken: a sample whose own id is another one; and a sample whose reading raised an error that the data set
caught, after which it went to another index of one of its own lists. Reading takes a few seconds in a process of its
own, because a data set that replaces what it cannot read may never come back. What is not seen: a replaced sample that
carries no id, in a data set that keeps no list of its samples.
"""

from __future__ import annotations

import contextlib
import copy
import multiprocessing
import sys
import time
import warnings
from collections.abc import Callable, Hashable, Iterator, Mapping
from types import FrameType
from typing import Any
from unittest import mock

import numpy as np
from torch.utils.data import ConcatDataset

from memfit.audit.group import Exchange, as_rank, quiet
from memfit.audit.ids import SURE_NAMES, named_id
from memfit.audit.loader_parts import data_set_of
from memfit.audit.target import is_loop, load_target

PROBES, SECONDS = 16, 5.0
_IS_IMMUTABLE = 1 << 8
"""Py_TPFLAGS_IMMUTABLETYPE: a class that C code defined, whose methods cannot be replaced."""


def replaced_samples(target: str | Callable[..., Any]) -> str | None:
    """What was seen, where a map-style data set gives other samples than asked for; None where it does not."""
    if "fork" not in multiprocessing.get_all_start_methods():
        return None
    with as_rank(0, 1, Exchange(1)), quiet():
        function = load_target(target) if isinstance(target, str) else target
        if is_loop(function):
            return None
        dataset = data_set_of(function(0, 1))
        if dataset is None or not hasattr(dataset, "__len__"):
            return None
        receive, send = multiprocessing.Pipe(duplex=False)
        reader = multiprocessing.get_context("fork").Process(target=_read_into, args=(send, dataset), daemon=True)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            reader.start()
    send.close()
    try:
        answer: str | None = receive.recv() if receive.poll(SECONDS + 3) else None
    except EOFError:
        answer = None
    reader.kill()
    reader.join()
    return answer


def _read_into(send: Any, dataset: Any) -> None:
    with contextlib.redirect_stdout(None), contextlib.redirect_stderr(None):
        send.send(_read(dataset))


def _read(dataset: Any) -> str | None:
    """Data sets that are put one behind the other each have ids of their own."""
    until = time.monotonic() + SECONDS
    parts = dataset.datasets if isinstance(dataset, ConcatDataset) else [dataset]
    return next((answer for part in parts if (answer := _read_one(part, until)) is not None), None)


def _read_one(dataset: Any, until: float) -> str | None:
    plain: dict[int, Hashable] = {}
    named: dict[int, Hashable] = {}
    strayed: dict[int, Hashable] = {}
    read = 0
    with _recorded(dataset) as (recorded, log):
        for index in range(len(dataset)):
            log.clear()
            if (index >= PROBES and not read) or time.monotonic() > until:
                break
            try:
                sample = recorded[index]
            except Exception:
                continue
            read += 1
            if (last := _strayed(log, index)) is not None:
                strayed[index] = last
            fields = [sample[name] for name in SURE_NAMES if name in sample] if isinstance(sample, Mapping) else []
            if fields and (name := named_id(fields[0])) is not None:
                named[index] = name
            elif not isinstance(sample, Mapping) and (name := named_id(sample)) is not None:
                plain[index] = name
    wrong = _not_asked_for(plain) or _not_asked_for(named) or _repeated(named) or list(strayed.items())
    if not wrong:
        return None
    shown = ", ".join(f"{index} gives {name}" for index, name in wrong[:4])
    return f"The data set gives another sample than was asked for {len(wrong)} times in {read} ({shown})."


def _not_asked_for(names: dict[int, Hashable]) -> list[tuple[int, Hashable]]:
    """Names that are not the index, where most names are."""
    wrong = [(index, name) for index, name in names.items() if name != index]
    return wrong if len(names) > 1 and len(wrong) <= 0.5 * len(names) else []


def _repeated(names: dict[int, Hashable]) -> list[tuple[int, Hashable]]:
    """Names that came before under another index, where names tell samples apart."""
    first: dict[Hashable, int] = {}
    for index, name in names.items():
        first.setdefault(name, index)
    if len(first) < 0.5 * len(names):
        return []
    return [(index, name) for index, name in names.items() if first[name] != index]


def _strayed(log: list[int | None], index: int) -> int | None:
    """The index of its own lists that a data set went to after an error (None in the log) and not back from."""
    if None not in log or index not in log[: log.index(None)]:
        return None
    after: list[int | None] = []
    for at in log:
        after = [] if at is None else [*after, at]
    return after[-1] if after and index not in after else None


@contextlib.contextmanager
def _recorded(dataset: Any) -> Iterator[tuple[Any, list[int | None]]]:
    """The data set with its own lists watched: which indices are read, and None for each error that it catches.

    A list, a range or an array gives what it is asked for: it is read as it is.
    """
    log: list[int | None] = []
    if type(dataset).__flags__ & _IS_IMMUTABLE:
        yield dataset, log
        return
    watched = copy.copy(dataset)
    for name, value in list(getattr(watched, "__dict__", {}).items()):
        if type(value) in (list, tuple, np.ndarray) and len(value) == len(dataset):
            watched.__dict__[name] = _Watched(value, log)
    own = {id(code) for kind in type(dataset).__mro__ for code in _codes(kind)}
    get = type(dataset).__getitem__

    def get_watched(this: Any, index: Any) -> Any:
        if isinstance(index, int):
            log.append(index)
        return get(this, index)

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        if id(frame.f_code) not in own:
            return None
        if event == "exception" and argument[0] is not StopIteration:
            log.append(None)
        return trace

    before = sys.gettrace()
    with mock.patch.object(type(dataset), "__getitem__", get_watched):
        sys.settrace(trace)
        try:
            yield watched, log
        finally:
            sys.settrace(before)


def _codes(kind: type) -> list[Any]:
    return [value.__code__ for value in vars(kind).values() if hasattr(value, "__code__")]


class _Watched:
    """A list of a data set's; tells which of its items are read."""

    def __init__(self, items: Any, log: list[int | None]) -> None:
        self._items, self._log = items, log

    def __len__(self) -> int:
        return len(self._items)

    def __iter__(self) -> Iterator[Any]:
        return iter(self._items)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, (int, np.integer)):
            self._log.append(int(index) % len(self._items))
        return self._items[index]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._items, name)
