"""The validation of a trace that was made without it, after another trace of the same step that has it.

Many jobs validate a batch that does not depend on the micro-batch. Then nothing of validation does, but for what it
finds on the card and in the job's objects. It is repeated where

* the job made the other one's batch without reading the micro-batch's shape, and the card answers the same to all that
  the other trace asked of its card,
* the windows have left as many bytes of each category, storage by storage: a mask or a batch that is kept may be read
  in validation,
* the windows have changed the same attributes of the job, its modules, their classes and files to the same numbers and
  words: a size that is remembered may be read in validation,
* the other validation freed only what it made, left nothing, and took no sizes for data.
"""

from __future__ import annotations

import hashlib
import logging
import sys
from dataclasses import replace
from types import FunctionType, ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from torch import Tensor, nn

from memfit.events import ALLOCATE, FREE, Trace
from memfit.trace.second_window import with_second_window
from memfit.trace.trace_columns import CARD_CALL, OPERATORS, STORAGES, by_appearance, scratch_of, storage_numbers
from memfit.trace.window_runs import two_windows

if TYPE_CHECKING:
    from memfit.apply.train_state import TrainState

SAVING = "save"
"""The part of saving's operators."""
DEPTH, MOST = 3, 64
"""How deep, and of how many entries, what an attribute holds is looked at."""
_NONE = "no such attribute"
_HOOKS = frozenset(name for name in vars(nn.Module()) if "hooks" in name)
"""Attributes of a module that hold hooks, of which libraries add some at the first forward: they are counted."""
_CONTAINERS = (tuple, list, set, frozenset, dict)
"""Their own methods are called: that of a class derived from them may load or count something, as Transformers' do."""
_TOLD_APART = (nn.Module, Tensor, type, ModuleType, FunctionType, logging.Logger)
"""What is never looked into."""
Attributes = list[tuple[object, dict[str, Any]]]
"""Objects, and what each of their attributes held, as ``_held`` has it."""


def attributes_of(train_state: TrainState) -> Attributes:
    """What the job, its nets' modules, their classes and the files that define these hold now."""
    objects: list[object] = [train_state.job]
    objects += [module for net in train_state.nets.values() for module in net.modules() if not _is_wrapper(module)]
    classes = dict.fromkeys(kind for each in objects for kind in type(each).__mro__ if not _is_of_library(kind))
    files = dict.fromkeys(kind.__module__ for kind in classes)
    objects += [*classes, *(sys.modules[name] for name in files if name in sys.modules)]
    return [(each, _attributes(each)) for each in objects]


def changes_since(before: Attributes) -> str:
    """What attributes hold that they did not before, digested; empty where that is more than numbers and words."""
    changes = []
    for place, (each, attributes) in enumerate(before):
        now = _attributes(each)
        if now != attributes:
            names = [name for name in (*attributes, *now) if attributes.get(name, _NONE) != now.get(name, _NONE)]
            changes += [(place, name, now.get(name, _NONE)) for name in dict.fromkeys(names)]
    if not all(_is_known(value) for _, _, value in changes):
        return ""
    return hashlib.sha256(repr(changes).encode()).hexdigest()[:16]


def _is_of_library(kind: type) -> bool:
    """Whether a class is Python's, torch's or memfit's own: these remember nothing of a micro-batch."""
    return kind.__module__ == "builtins" or kind.__module__.split(".")[0] in ("torch", "memfit")


def _is_wrapper(module: nn.Module) -> bool:
    """Whether a module is one of torch's engines, which counts its forwards."""
    return type(module).__module__.startswith("torch.nn.parallel.")


def _attributes(each: object) -> dict[str, Any]:
    return {
        name: len(value) if name in _HOOKS else _held(value)
        for name, value in vars(each).items()
        if not (name.startswith("__") and name.endswith("__"))  # Python's own, such as a file's loader
    }


class _Object(NamedTuple):
    """What is told from others by which object it is."""

    identity: int
    held: int
    """How much it holds, where it is a container."""


def _held(value: object, depth: int = DEPTH) -> object:
    """What an attribute holds, to be compared: numbers and words by their values, small containers and plain objects by
    what they hold, all else by which object it is."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    kind: Any = next((kind for kind in _CONTAINERS if isinstance(value, kind)), None)
    count = kind.__len__(value) if kind is not None else 0
    if depth == 0 or count > MOST or isinstance(value, _TOLD_APART):
        return _Object(id(value), count)
    if isinstance(value, dict):
        return tuple((_held(key, depth - 1), _held(each, depth - 1)) for key, each in dict.items(value))
    if kind is not None:
        return tuple(_held(each, depth - 1) for each in kind.__iter__(value))
    try:
        own = object.__getattribute__(value, "__dict__")
    except Exception:  # of an object of anybody's
        own = None
    return (_Object(id(value), 0), _held(own, depth - 1)) if isinstance(own, dict) else _Object(id(value), 0)


def _is_known(held: object) -> bool:
    """Whether what is held is told by its value alone."""
    return not isinstance(held, _Object) and (not isinstance(held, tuple) or all(map(_is_known, held)))


def with_what_follows(trace: Trace, like: Trace) -> Trace | None:
    """A trace with the second window and the validation that it lacks; None where they do not follow.

    Args:
        like: the same step at another size or on another card, whole.
    """
    phases, phases_like = ([name for name, _, _ in some.phases] for some in (trace, like))
    whole: Trace | None = trace
    if phases.count("train") < 2:
        whole = with_second_window(trace, like)
    if whole is not None and "validate" in phases_like and "validate" not in phases:
        whole = with_validation(whole, like)
    return whole


def validation_follows(trace: Trace, like: Trace) -> bool:
    """Whether ``with_validation`` gives a trace its validation.

    Args:
        trace: setup and one or two windows, and nothing behind them.
        like: the same step, whole.
    """
    windows = trace if len(trace.phases) > 2 else with_second_window(trace, like)
    return windows is not None and _follows(windows, like)


def _follows(trace: Trace, like: Trace) -> bool:
    validation = next((phase for phase in like.phases if phase[0] == "validate"), None)
    if validation is None or like.assumed or len(trace.phases) != 3:
        return False
    if trace.modules != like.modules[: len(trace.modules)]:
        return False
    _, start, end = validation
    rows = _rows(like)
    kind, storage, operator = (column[start:end] for column in (like.kind, like.storage, like.operator))
    is_apart = rows is not None and len(operator) > 0 and rows.start <= operator.min() and operator.max() < rows.stop
    if not is_apart or not np.array_equal(np.sort(storage[kind == ALLOCATE]), np.sort(storage[kind == FREE])):
        return False
    left, left_like = _left(trace, trace.phases[-1][2]), _left(like, start)
    return all(np.array_equal(own, other) for own, other in zip(left, left_like, strict=True))


def _left(trace: Trace, end: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(storages of setup that are there after so many events, their bytes, int (3, storages): category, bytes and
    stream of the others, sorted)."""
    kind, storage = trace.kind[:end], trace.storage[:end]
    is_there, is_setup = (np.zeros(len(trace.nbytes), bool) for _ in range(2))
    is_there[storage[kind == ALLOCATE]] = True
    is_there[storage[kind == FREE]] = False
    begin = trace.phases[0][2]
    is_setup[storage[:begin][kind[:begin] == ALLOCATE]] = True
    others = np.flatnonzero(is_there & ~is_setup)
    columns = np.stack([trace.category[others].astype(int), trace.nbytes[others], trace.stream[others].astype(int)])
    setup = np.flatnonzero(is_there & is_setup)
    return setup, trace.nbytes[setup], columns[:, np.lexsort(columns)]


def with_validation(trace: Trace, like: Trace) -> Trace | None:
    """The trace with the validation of another one behind its windows; None where storages are not freed as they are
    made.

    Args:
        trace: setup, two windows and saving; ``validation_follows`` holds of its windows.
        like: the same step, whole.
    """
    end = trace.phases[2][2]
    _, start, stop = next(phase for phase in like.phases if phase[0] == "validate")
    rows = _rows(like)
    assert rows is not None
    row, count = _first_of_saving(trace, 0), rows.stop - rows.start
    kind, storage, operator = (column[start:stop] for column in (like.kind, like.storage, like.operator))
    made = storage[kind == ALLOCATE]
    new = np.full(len(like.nbytes) + 1, -1)  # the last one stands for no storage
    new[made] = len(trace.nbytes) + np.arange(len(made))
    kind = np.concatenate([trace.kind[:end], kind, trace.kind[end:]])
    storage = np.concatenate([trace.storage[:end], new[storage], trace.storage[end:]])
    operator = np.concatenate([trace.operator[:end], operator + (row - rows.start), trace.operator[end:] + count])
    numbers = storage_numbers(kind, storage, np.concatenate([scratch_of(trace), scratch_of(like)[made]]))
    if numbers is None:
        return None
    columns: dict[str, Any] = {
        name: np.concatenate([getattr(trace, name), getattr(like, name)[made]]) for name in STORAGES
    }
    own_made_by = trace.made_by + count * (trace.made_by >= row)
    columns["made_by"] = np.concatenate([own_made_by, like.made_by[made] + (row - rows.start)])
    columns = {name: column[np.argsort(numbers)] for name, column in columns.items()}
    tables = {
        "operator_name": (trace.names, like.names), "operator_part": (trace.parts, like.parts),
        CARD_CALL: (trace.card_calls, like.card_calls),
    }  # fmt: skip
    joined = {}
    for name in OPERATORS:
        inserted = getattr(like, name)[rows]
        if name in tables:
            joined[name] = table = dict.fromkeys([word for words in tables[name] for word in words])
            places = {word: place for place, word in enumerate(table)}
            inserted = np.array([places[word] for word in tables[name][1]], int)[inserted]
        column = getattr(trace, name)
        columns[name] = np.concatenate([column[:row], inserted, column[row:]])
    columns["operator_name"], names = by_appearance(columns["operator_name"], tuple(joined["operator_name"]))
    columns["operator_part"], parts = by_appearance(columns["operator_part"], tuple(joined["operator_part"]))
    columns[CARD_CALL], card_calls = by_appearance(columns[CARD_CALL], tuple(joined[CARD_CALL]))
    grown = stop - start
    later = [(name, first + grown, last + grown) for name, first, last in trace.phases[3:]]
    columns |= {"kind": kind, "operator": operator, "storage": np.where(storage >= 0, numbers[storage], -1)}
    return replace(
        trace, names=names, parts=parts, card_calls=card_calls, fixed_validation=like.fixed_validation,
        modules=max(trace.modules, like.modules, key=len), net_kind=like.net_kind,
        phases=(*trace.phases[:3], ("validate", end, end + grown), *later),
        **{name: column.astype(getattr(trace, name).dtype) for name, column in columns.items()},
    )  # fmt: skip


def _rows(trace: Trace) -> slice | None:
    """The operators of validation: those between the windows and saving; None where its windows are not alike."""
    windows = two_windows(trace)
    if windows is None:
        return None
    begin = int(windows[1].operators[-1])
    return slice(begin, _first_of_saving(trace, begin))


def _first_of_saving(trace: Trace, begin: int) -> int:
    """The first operator of saving from one on; the number of operators where it has none."""
    parts = np.array([part == SAVING for part in trace.parts])[trace.operator_part[begin:]]
    return begin + int(np.argmax(parts)) if parts.any() else len(trace.operator_part)
