"""Data sets that give another sample than was asked for, or None that a collate leaves out, seen by reading some.

Three signs are taken of another sample: its own id is another one; it is the very object that the data set gave itself
for another index; or its reading raised an error that the data set caught, after which it went to another index of one
of its own lists. Reading takes a few seconds in a process of its
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
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
from torch.utils.data import ConcatDataset

from memfit.audit.group import Exchange, as_rank, quiet
from memfit.audit.ids import SURE_NAMES, named_id
from memfit.audit.loader_parts import map_style_loader
from memfit.audit.target import is_loop, load_target

PROBES, SECONDS = 16, 5.0
_IS_IMMUTABLE = 1 << 8
"""Py_TPFLAGS_IMMUTABLETYPE: a class that C code defined, whose methods cannot be replaced."""


class SampleFaults(NamedTuple):
    """What was seen of a map-style data set's samples; None where nothing was."""

    replaced: str | None = None
    left_out: str | None = None
    """Samples that are None, where the loader's collate takes a batch with one."""


def sample_faults(target: str | Callable[..., Any]) -> SampleFaults:
    """What reading the data set of a target shows."""
    if "fork" not in multiprocessing.get_all_start_methods():
        return SampleFaults()
    with as_rank(0, 1, Exchange(1)), quiet():
        function = load_target(target) if isinstance(target, str) else target
        if is_loop(function):
            return SampleFaults()
        loader = map_style_loader(function(0, 1))
        if loader is None or not hasattr(loader.dataset, "__len__"):
            return SampleFaults()
        receive, send = multiprocessing.Pipe(duplex=False)
        reader = multiprocessing.get_context("fork").Process(target=_read_into, args=(send, loader), daemon=True)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            reader.start()
    send.close()
    try:
        answer: SampleFaults = receive.recv() if receive.poll(SECONDS + 3) else SampleFaults()
    except EOFError:
        answer = SampleFaults()
    reader.kill()
    reader.join()
    return answer


def _read_into(send: Any, loader: Any) -> None:
    with contextlib.redirect_stdout(None), contextlib.redirect_stderr(None):
        send.send(_read(loader.dataset, loader.collate_fn if loader.batch_sampler is not None else None))


def _read(dataset: Any, collate: Callable[[list[Any]], Any] | None = None) -> SampleFaults:
    """Data sets that are put one behind the other each have ids of their own."""
    until = time.monotonic() + SECONDS
    parts = dataset.datasets if isinstance(dataset, ConcatDataset) else [dataset]
    return next((faults for part in parts if any(faults := _read_one(part, until, collate))), SampleFaults())


def _read_one(dataset: Any, until: float, collate: Callable[[list[Any]], Any] | None) -> SampleFaults:
    plain: dict[int, Hashable] = {}
    named: dict[int, Hashable] = {}
    strayed: dict[int, Hashable] = {}
    absent: list[int] = []
    present: Any = None
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
            if sample is None:
                absent.append(index)
                continue
            present = sample
            if (last := _strayed(log, index)) is not None:
                strayed[index] = last
            fields = [sample[name] for name in SURE_NAMES if name in sample] if isinstance(sample, Mapping) else []
            if fields and (name := named_id(fields[0])) is not None:
                named[index] = name
            elif not isinstance(sample, Mapping) and (name := named_id(sample)) is not None:
                plain[index] = name
    wrong = _not_asked_for(plain) or _not_asked_for(named) or _repeated(named) or list(strayed.items())
    replaced = left_out = None
    if wrong:
        shown = ", ".join(f"{index} gives {name}" for index, name in wrong[:4])
        replaced = f"The data set gives another sample than was asked for {len(wrong)} times in {read} ({shown})."
    if absent and present is not None and _takes_none(collate, present):
        shown = ", ".join(map(str, absent[:4])) + (" …" if len(absent) > 4 else "")
        left_out = (
            f"The data set gives None {len(absent)} times in {read} (index {shown}), and the loader's collate takes a "
            "batch with it: such samples are left out in silence, and batches differ in size."
        )
    return SampleFaults(replaced, left_out)


def _takes_none(collate: Callable[[list[Any]], Any] | None, present: Any) -> bool:
    if collate is None:
        return False
    try:
        collate([present, None])
    except Exception:
        return False
    return True


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
    """The index of its own lists that a data set went to after an error (None in the log) and not back from.

    A sample that the data set took from itself under another index is logged as an error, the other index and no more.
    """
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

    inner: list[tuple[Any, int, Any]] = []

    def get_watched(this: Any, index: Any) -> Any:
        if not isinstance(index, int):
            return get(this, index)
        log.append(index)
        start = len(inner)
        sample = get(this, index)
        handed_on = [at for other, at, given in inner[start:] if other is this and given is sample and at != index]
        if handed_on and not isinstance(sample, (int, str, bytes, type(None))):
            log[:] = [index, None, handed_on[0]]
        del inner[start:]
        inner.append((this, handed_on[0] if handed_on else index, sample))
        return sample

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
