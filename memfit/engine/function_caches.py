"""Results that functions of a library keep for later calls (``functools.lru_cache``), such as tables of positions."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import lru_cache
from types import FunctionType, ModuleType
from typing import Any

from memfit.nested_tensors import tensors_in
from memfit.torch_compat import FakeTensor

_KIND: type[Any] = type(lru_cache(lambda: None))


@contextmanager
def without_fake_results() -> Iterator[None]:
    """Functions of imported modules and their classes that are called inside keep no tensors without bytes: a later
    call would get those."""
    before = [(function, function.cache_info().misses) for function in _keeping(len(sys.modules))]
    try:
        yield
    finally:
        for function, misses in before:
            if function.cache_info().misses > misses and _keeps_fakes(function):
                function.cache_clear()


@lru_cache(maxsize=1)
def _keeping(modules: int) -> tuple[Any, ...]:
    """All functions that keep results, while so many modules are imported."""
    functions = {id(each): each for module in list(sys.modules.values()) for each in _functions_of(module)}
    return tuple(functions.values())


def _functions_of(module: Any) -> Iterator[Any]:
    """Of a module and its classes; no attribute of a value is asked for, which may warn or import something."""
    for value in list(vars(module).values()) if isinstance(module, ModuleType) else ():
        yield from _within(value)
        if issubclass(type(value), type):
            for member in list(vars(value).values()):
                yield from _within(member.__func__ if type(member) in (staticmethod, classmethod) else member)


def _within(value: Any) -> Iterator[Any]:
    """A function that keeps results, or the one that a decorator has put another one around."""
    if type(value) is _KIND:
        yield value
    elif type(value) is FunctionType:
        for cell in value.__closure__ or ():
            with suppress(ValueError):  # a cell that is not filled yet
                if type(cell.cell_contents) is _KIND:
                    yield cell.cell_contents


def _keeps_fakes(function: Any) -> bool:
    return any(isinstance(tensor, FakeTensor) for tensor in tensors_in(gc.get_referents(function)))
