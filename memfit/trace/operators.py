"""What a trace asks of an operator whatever it is called with, looked up once for each operator."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import flop_registry

from memfit.device.virtual import cudnn_benchmark, workspace
from memfit.device.virtual.virtual_device import is_intercepted
from memfit.torch_compat.attributes import schema_of
from memfit.trace import autograd_formulas, linear_sums, mask_operators, range_operators
from memfit.trace.collectives import HOLDS, is_collective
from memfit.trace.index_bounds import looks_up
from memfit.trace.mask_operators import Follow
from memfit.trace.operand_types import is_checked
from memfit.trace.sparse_tensors import MAY_BE_SPARSE

_COPIES = frozenset({torch.ops.aten._to_copy.default, torch.ops.aten.copy_.default})


@dataclass(frozen=True, kw_only=True, slots=True)
class Operator:
    """An operator's part in a trace."""

    name: str
    is_intercepted: bool
    """Whether ``Virtual.intercept`` may have something to say about it outside of inference mode."""
    may_be_sparse: bool
    """Whether ``takes_sparse`` may say so of tensors where none was sparse before."""
    is_checked: bool
    """Whether its operands have types to be checked."""
    looks_up: bool
    """Whether its indices are compared with the rows that there are."""
    flops: Callable[..., int] | None
    """Floating point operations, as ``torch.utils.flop_counter`` counts them; None where it counts none."""
    writes: bool
    """It writes to an argument."""
    copies: bool
    """It may move data between host and device."""
    holds: bool
    """It communicates between ranks, and its arguments are buffers of that."""
    joins: bool
    """It waits for other ranks."""
    searches: bool
    """cuDNN chooses among plans for it."""
    takes: bool
    """Whether a CUDA kernel of it may allocate memory of its own."""
    makes_zeros: bool
    """It gives zeros."""
    in_place: Any
    """What formulas of autograd call in a real run, where this is called on zeros that they made; None: this too."""
    is_of_linear: bool
    """A linear layer may call it: ``memfit.trace.linear_sums``."""
    follows_values: Follow | None
    """Notes which values its output, a mask, is of, and between which numbers integers lie."""


_known: dict[Any, Operator] = {}


def operator(func: Any) -> Operator:
    """The operator that a dispatch mode is called with."""
    known = _known.get(func)
    if known is None:
        schema = schema_of(func)
        known = _known[func] = Operator(
            name=str(func),
            is_intercepted=is_intercepted(func),
            may_be_sparse=func in MAY_BE_SPARSE,
            is_checked=is_checked(func),
            looks_up=looks_up(func),
            flops=flop_registry.get(func.overloadpacket),
            writes=schema.is_mutable,
            copies=func in _COPIES,
            holds=schema.name in HOLDS,
            joins=is_collective(func),
            searches=func in cudnn_benchmark.CONVOLUTIONS,
            takes=func in workspace.TAKING,
            makes_zeros=func in autograd_formulas.ZEROS,
            in_place=autograd_formulas.IN_PLACE.get(func),
            is_of_linear=func in linear_sums.PRODUCTS_AND_SUMS,
            follows_values=_both(mask_operators.follows(func), range_operators.follows(func)),
        )
    return known


def _both(first: Follow | None, second: Follow | None) -> Follow | None:
    if first is None or second is None:
        return first or second

    def follow(func: Any, args: Any, out: Any) -> None:
        first(func, args, out)
        second(func, args, out)

    return follow


def work(flops: Callable[..., int], args: Any, kwargs: Any, out: Any) -> int:
    """Floating point operations of one call; 0 where the formula does not take its arguments.

    torch's formulas are functions of shapes inside of one that takes the shapes of tensors, through its trees, which
    takes longer than the formula. Those of libraries may be any function.
    """
    on_shapes = getattr(flops, "__wrapped__", None)
    if on_shapes is None:
        with contextlib.suppress(Exception):
            return flops(*args, **kwargs, out_val=out)
        return 0
    shapes, named, made = _shapes(args), {name: _shapes(value) for name, value in kwargs.items()}, _shapes(out)
    try:
        count: int = on_shapes(*shapes, out_shape=made, **named)
        return count
    except Exception:
        others = (
            _with_all_heads(shapes),  # before GQA was in the formula
            tuple(shape for shape in shapes if isinstance(shape, torch.Size)),  # of an overload with more arguments
        )
    for given in others:
        with contextlib.suppress(Exception):
            count = on_shapes(*given, out_shape=made, **named)
            return count
    return 0


def _with_all_heads(shapes: Any) -> Any:
    """Shapes of an attention's arguments, (batch, heads, length, width): keys and values have the queries' heads."""
    heads = max((shape[1] for shape in shapes if isinstance(shape, torch.Size) and len(shape) == 4), default=0)
    return tuple(
        (shape[0], heads, *shape[2:]) if isinstance(shape, torch.Size) and len(shape) == 4 else shape
        for shape in shapes
    )


def _shapes(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.shape
    return tuple(map(_shapes, value)) if isinstance(value, list | tuple) else value
