"""torch.compile in a trace: nets and functions take what inductor's code takes (``compiled_regions.py``), and a
function that changes its arguments (an optimizer's step) what its scheduler plans.

What cannot be compiled without a card runs as it was written. Either is noted, since neither was held against a card.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn

from memfit.device.virtual.assumptions import EAGER, PLANNED
from memfit.device.virtual.backend import NAME
from memfit.device.virtual.compiled_regions import (
    CompiledCall,
    CompiledRegion,
    RegionCompiler,
    called_module,
    compile_module,
    compiled_region,
    entered_compiler,
    regions_entered,
)
from memfit.device.virtual.inductor_plan import CompiledKernel, compiled_plan
from memfit.device.virtual.patching import replaced
from memfit.torch_compat import is_traceable_wrapper_subclass, tree_flatten, tree_unflatten
from memfit.torch_compat.attributes import inner_tensors
from memfit.torch_compat.compiled_callables import compiled_anew
from memfit.torch_compat.tracing import eager_calls_noted

_PLANNED_OPTIONS = {"fullgraph", "dynamic", "disable"}
"""Others change what inductor writes, or are unknown."""
_plans: dict[Hashable, tuple[CompiledKernel, ...] | None] = {}
"""By function and what it was called with; inductor takes a second for each."""
_without_plan: set[FunctionType] = set()
"""Functions that return something or that inductor does not take whole: they are not tried again with other shapes."""


class CompiledFunction:
    """A function that torch.compile was given, and what it compiled to: called as either."""

    def __init__(self, function: FunctionType, region: CompiledRegion) -> None:
        functools.update_wrapper(self, function)
        self.function, self.region = function, region
        self.noted_by = region.noted_by

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs inductor's plan where there is one, and else the function as it was written."""
        if torch.compiler.is_dynamo_compiling() or (compiler := entered_compiler()) is None:
            return self.region(*args, **kwargs)
        leaves, spec = tree_flatten((args, kwargs))
        tensors = [inner for leaf in leaves if isinstance(leaf, Tensor) for inner in inner_tensors(leaf)]
        kernels: tuple[CompiledKernel, ...] | None = None
        if not torch.is_grad_enabled() and any(tensor.device.type == NAME for tensor in tensors):
            kernels = self._plan(leaves, spec, tensors)
        if kernels is None:
            return self.region(*args, **kwargs)
        self.region.note(compiler, PLANNED)
        _allocate(kernels)
        return None

    def __get__(self, owner: Any, kind: Any = None) -> Any:
        return self if owner is None else functools.partial(self, owner)

    def _plan(self, leaves: list[Any], spec: Any, tensors: list[Tensor]) -> tuple[CompiledKernel, ...] | None:
        key = (self.function, str(spec), *map(_described, leaves))
        if self.function in _without_plan:
            return None
        if key not in _plans:

            def on_others(*others: Tensor) -> None:
                given = iter(others)
                args, kwargs = tree_unflatten([_filled(leaf, given) for leaf in leaves], spec)
                result = self.function(*args, **kwargs)
                if result is not None:
                    raise TypeError("a function that returns something has no plan")

            try:
                _plans[key] = compiled_plan(on_others, tensors)
            except Exception:  # inductor is private to torch, and a function may be none that it takes whole
                _plans[key] = None
        if _plans[key] is None:
            _without_plan.add(self.function)
        return _plans[key]


def _described(leaf: Any) -> Hashable:
    """What a plan depends on of one argument."""
    if not isinstance(leaf, Tensor):
        return (type(leaf), leaf if isinstance(leaf, Hashable) else str(leaf))
    parts = [(tuple(t.shape), t.stride(), t.dtype, t.device.type) for t in inner_tensors(leaf)]
    return (type(leaf).__qualname__, leaf.dtype, *parts)


def _filled(leaf: Any, tensors: Iterator[Tensor]) -> Any:
    """The argument with other tensors in its place, or in the place of those that it holds."""
    if not isinstance(leaf, Tensor):
        return leaf
    if not is_traceable_wrapper_subclass(leaf):
        return next(tensors)
    names, attributes = leaf.__tensor_flatten__()
    inner = {name: _filled(getattr(leaf, name), tensors) for name in names}
    return type(leaf).__tensor_unflatten__(inner, attributes, leaf.shape, leaf.stride())


def _allocate(kernels: tuple[CompiledKernel, ...]) -> None:
    """Makes and frees the buffers of a plan, one kernel after another."""
    held: dict[str, Tensor] = {}
    for kernel in kernels:
        for name, nbytes in kernel.allocates:
            held[name] = torch.empty(nbytes, dtype=torch.uint8, device=NAME)
        for name in kernel.frees:
            del held[name]


@contextmanager
def compiled_functions(note: Callable[[str], None]) -> Iterator[None]:
    """A context in which what is compiled, or was when a job was loaded, takes the memory that inductor's code takes.

    Args:
        note: called with PLANNED or EAGER for each call of compiled code. What is compiled by another backend than
            inductor, with options of inductor's own, or was by code that is not known runs as it was written: EAGER.
    """
    compile_ = torch.compile

    def compiled(model: Any = None, **options: Any) -> Any:
        if model is None:
            return functools.partial(compiled, **options)
        made = compile_(model, **options)
        if made is model or not _is_planned(options):
            return made
        if isinstance(model, nn.Module):
            compile_module(model, made, compile_)
            return made
        if (module := called_module(model)) is not None:
            return CompiledCall(module, made, compile_)
        region = compiled_region(model, made, compile_)
        if isinstance(model, FunctionType) and model.__closure__ is None:
            return CompiledFunction(model, region)
        return region

    with (
        regions_entered(RegionCompiler(note)),
        eager_calls_noted(functools.partial(note, EAGER)),
        replaced(torch, compile=compiled),
        compiled_anew(compiled),
    ):
        yield


def _is_planned(options: dict[str, Any]) -> bool:
    """Whether inductor compiles with these options what it compiles without any."""
    given = {name: value for name, value in options.items() if value is not None}
    is_inductor = given.pop("backend", "inductor") == "inductor" and given.pop("mode", "default") == "default"
    return is_inductor and given.keys() <= _PLANNED_OPTIONS


def note_calls(made: Any, note: Callable[[str], None]) -> bool:
    """Has each call of what torch.compile made noted as PLANNED or EAGER; False where that is not known."""
    kinds = CompiledFunction | CompiledRegion | CompiledCall
    region = made if isinstance(made, kinds) else getattr(made, "__dict__", {}).get("forward")
    if not isinstance(region, kinds):
        return False
    region.noted_by.append(note)
    return True
