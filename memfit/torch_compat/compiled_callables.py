"""Functions and nets that code compiles with torch.compile while a job is loaded, before any trace of it.

What torch makes of them stays as it is in a real run. A trace puts another function in the place of the compiled one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial, wraps
from types import CellType, FunctionType
from typing import Any
from weakref import WeakSet

_made: WeakSet[FunctionType] = WeakSet()
"""What torch.compile made while a job was loaded: the wrapper of a function, or of a net's call."""
_GIVEN = "_memfit_compiled"
"""Attribute of such a wrapper: what torch.compile was given, and the options."""
_CALLED, _CALLBACK = "fn", "callback"
"""Variables of torch's wrapper: the function that it calls, and dynamo's callback for it."""
_FORWARDS = ("_forward", "forward")
"""Attributes of a compiled net, one of which is the wrapper of its call; a lazy net has both."""
_in_trace: list[Callable[..., Any]] = []
"""What compiles in the traces that are entered, innermost last."""


@contextmanager
def compiled_noted() -> Iterator[None]:
    """A context in which what torch.compile is given is noted. A name that code binds to torch.compile in it calls
    torch.compile for good, and within a trace what compiles there."""
    import torch

    compile_ = torch.compile

    @wraps(compile_)
    def compile_and_note(model: Any = None, **options: Any) -> Any:
        if model is None:
            return partial(compile_and_note, **options)
        if _in_trace:
            compile_in_trace = _in_trace.pop()  # which may call this function in turn
            try:
                return compile_in_trace(model, **options)
            finally:
                _in_trace.append(compile_in_trace)
        made = compile_(model, **options)
        if made is not model:
            _note(made, model, options)
        return made

    torch.compile = compile_and_note
    try:
        yield
    finally:
        if torch.compile is compile_and_note:
            torch.compile = compile_


def _note(made: Any, model: Any, options: dict[str, Any]) -> None:
    wrapper = made
    if not isinstance(made, FunctionType):
        held = getattr(made, "__dict__", {})
        wrapper = next((held[name] for name in _FORWARDS if isinstance(held.get(name), FunctionType)), None)
    if isinstance(wrapper, FunctionType) and _cells(wrapper):
        setattr(wrapper, _GIVEN, (model, options))
        _made.add(wrapper)


@contextmanager
def compiled_anew(compile_: Callable[..., Any]) -> Iterator[None]:
    """A context in which ``compile_`` compiles what was noted, each at its first call, and what code compiles by a name
    that it bound to torch.compile while it was loaded."""
    with ExitStack() as stack:
        for wrapper in list(_made):
            model, options = getattr(wrapper, _GIVEN)
            called, callback = _cells(wrapper)
            stack.enter_context(_with_content(called, _when_called(compile_, model, options)))
            stack.enter_context(_with_content(callback, None))
        _in_trace.append(compile_)
        stack.callback(_in_trace.remove, compile_)
        yield


@contextmanager
def _with_content(cell: CellType, content: Any) -> Iterator[None]:
    before = cell.cell_contents
    cell.cell_contents = content
    try:
        yield
    finally:
        cell.cell_contents = before


def _cells(wrapper: FunctionType) -> tuple[CellType, ...]:
    """The cells of the function that torch's wrapper calls and of its callback; () where it has no such variables."""
    cells = dict(zip(wrapper.__code__.co_freevars, wrapper.__closure__ or (), strict=True))
    has_both = _CALLED in cells and _CALLBACK in cells
    return (cells[_CALLED], cells[_CALLBACK]) if has_both else ()


def _when_called(compile_: Callable[..., Any], model: Any, options: dict[str, Any]) -> Callable[..., Any]:
    made: list[Any] = []

    def call(*args: Any, **kwargs: Any) -> Any:
        from torch import nn

        if not made:
            compiled = compile_(model, **options)
            made.append(compiled.forward if isinstance(model, nn.Module) else compiled)
        return made[0](*args, **kwargs)

    return call
