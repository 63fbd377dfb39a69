"""Known values: small tensors whose content follows from the code alone, such as positions, lengths and step counts.

A fake tensor has no data, but what is made from ``arange``, ``linspace``, ``full`` or a constant, and from nothing
else, has values that do not depend on the batch. They are computed beside the trace, so that code which branches on
them branches as it does in a real run. Left out: anything that draws random numbers, reads the batch or a parameter, or
is large.
"""

from __future__ import annotations

import contextlib
import math
from typing import Any

import torch
from torch import Tensor

from memfit.device.virtual.assumptions import (
    ASSUMED,
    ASSUMED_NUMBER,
    ASSUMED_TRUTH,
    assumed_count,
    assumed_integer,
    assumed_number,
)
from memfit.device.virtual.integer_ranges import INTEGERS
from memfit.device.virtual.unknown_content import is_unknown
from memfit.nested_tensors import tensors_in
from memfit.torch_compat import FakeTensor, disable_current_modes
from memfit.torch_compat.attributes import schema_of, storage_id_of
from memfit.trace.filled_tensors import MOST_ELEMENTS, content_before, note_fill
from memfit.trace.finite_checks import ANY, TRUTH, truth
from memfit.trace.forgotten_content import KNOWN, forget
from memfit.trace.host_distances import are_distances, may_be_distances
from memfit.trace.host_numbers import MOST_FROM_HOST, is_few_from_host, may_be_view_of_host
from memfit.trace.kept_integers import KEEPS_INTEGERS
from memfit.trace.one_operand import DECIDED_BY, decided
from memfit.trace.operator_parts import UNKNOWN_EFFECT, part_of

MOST_NUMBERS = 256
"""Floating point numbers of at most so many elements are followed: rates and widths of a net's layers."""

GATHERS_OWN = False
"""Whether integers that ranks gather are taken to be this rank's own on all of them: a script exchanges sizes, and what
computes shapes of them needs some that fit. A job's ranks may have others."""

_aten = torch.ops.aten
_MAKERS = frozenset(
    {
        _aten.arange.default, _aten.arange.start, _aten.arange.start_step, _aten.zeros.default, _aten.ones.default,
        _aten.full.default, _aten.scalar_tensor.default, _aten.lift_fresh.default, _aten.eye.default,
        _aten.linspace.default, _aten.logspace.default,
    }
)  # fmt: skip
_EMPTY = frozenset({_aten.empty_like.default, _aten.new_empty.default, _aten.new_empty_strided.default})
"""What they make of a known tensor is 0 until it is written to."""


class _Memory:
    """Whether the content of a tensor and of its views is known: what is written to one of them is in all."""

    is_known = True


class _Content:
    """A tensor's content beside it; a copy of the tensor (of a net, for its average) gets a copy of it."""

    def __init__(self, value: Tensor, memory: _Memory | None = None) -> None:
        self.value = value
        self.memory = memory or _Memory()

    def __deepcopy__(self, memo: dict[int, Any]) -> _Content:
        with disable_current_modes():
            copy = _Content(self.value.clone())
        copy.memory.is_known = self.memory.is_known
        return copy


def small(tensor: Any) -> bool:
    """Whether a tensor is of the kind that is followed."""
    if not isinstance(tensor, Tensor):
        return False
    return tensor.numel() <= (MOST_NUMBERS if tensor.is_floating_point() or tensor.is_complex() else MOST_ELEMENTS)


def value_of(tensor: Any) -> Tensor | None:
    """The tensor's real content, on the CPU, where it is known."""
    if isinstance(tensor, FakeTensor):
        content = tensor.__dict__.get(KNOWN)
        return content.value if content is not None and content.memory.is_known else None
    if not isinstance(tensor, Tensor) or is_unknown(tensor):
        return None
    return tensor if small(tensor) or tensor.numel() <= MOST_FROM_HOST else None


def know(tensor: Tensor, value: Tensor) -> None:
    """Notes the content of a tensor that was computed beside the trace; of a large one nothing is kept."""
    if small(tensor):
        tensor.__dict__[KNOWN] = _Content(value)


def may_follow(func: Any, out: Any) -> bool:
    """Whether ``follow`` may have something to do for a call of this operator with tensors of these sizes and types."""
    part = part_of(func)
    if part.fills or part.puts or part.checks or part.receives or part.written or func in KEEPS_INTEGERS:
        return True
    if may_be_view_of_host(func, out) or may_be_distances(func):
        return True
    outs = out if isinstance(out, list | tuple) else (out,)
    return all(isinstance(made, Tensor) and (not made.is_floating_point() or small(made)) for made in outs)


def follow(func: Any, args: Any, kwargs: Any, out: Any) -> None:
    """Computes the content of an operator's outputs where all its inputs' is known; forgets what it overwrote.

    Numbers that are not known are finite (``memfit.trace.finite_checks``).
    """
    part = part_of(func)
    if part.fills:
        note_fill(func, args, out)
    elif part.puts and value_of(args[0]) is None and (before := content_before(args[0])) is not None:
        args[0]._memfit_value = _Content(before)
    if part.checks and value_of(args[0]) is None and (holds := truth(func, args)) is not None:
        setattr(out, TRUTH, holds)
        if out.numel() == 1:
            with disable_current_modes():
                out._memfit_value = _Content(torch.full(out.shape, holds, dtype=torch.bool))
        return
    changed = [
        tensor
        for i in part.written
        if i < len(args)
        for tensor in (args[i] if isinstance(args[i], list) else [args[i]])
    ]
    outs = out if isinstance(out, list | tuple) else (out,)
    if part.receives:
        changed = list(tensors_in(args[0]))
    if not changed:
        for made in outs:
            if not small(made) and not _holds_known_numbers(func, args, made):
                return
    if part.makes_weights and out.is_floating_point() and out.numel() > 1:
        return
    values = real_arguments(func, args, kwargs)
    absorbed = decided(func, map(_operand, args[:2]), out) if values is None and func in DECIDED_BY else None
    result = _NOT_COMPUTED if values is None or part.is_unknown else _computed(func, values, outs)
    if result is _NOT_COMPUTED:
        for tensor in changed:
            forget(tensor)
        _assume(func, args, kwargs, out)
        if changed and isinstance(args[0], FakeTensor) and (written := _written(func, args)) is not None:
            setattr(args[0], ASSUMED, written)
        if absorbed is not None:
            out._memfit_value = _Content(absorbed)
        if part.gathers and GATHERS_OWN:
            _know_gathered(args, out, in_place=part.receives)
        return
    with disable_current_modes():
        memories = _memories(args)
    results = result if isinstance(result, list | tuple) else (result,)
    for produced, known in zip(outs, results, strict=True):
        if isinstance(produced, FakeTensor) and isinstance(known, Tensor):
            produced._memfit_value = _Content(known, memories.get(storage_id_of(known)))  # type: ignore[attr-defined]


def _operand(argument: Any) -> Tensor | None:
    return value_of(argument) if isinstance(argument, Tensor) else torch.tensor(argument)


def _holds_known_numbers(func: Any, args: Any, made: Any) -> bool:
    """Whether many floating point numbers are known: integers, such as a mask's, or what the host had. No net's weights
    are."""
    if is_few_from_host(func, args, made):
        return value_of(args[0]) is not None
    if are_distances(func, made):
        return all(value_of(points) is not None for points in args[:2] if isinstance(points, Tensor))
    if func not in KEEPS_INTEGERS or not isinstance(made, Tensor) or made.numel() > MOST_ELEMENTS:
        return False
    known = value_of(args[0])
    return known is not None and (not (known.is_floating_point() or known.is_complex()) or not small(known))


_NOT_COMPUTED = object()
"""In place of what an operator gives, which this machine cannot compute."""


def _computed(func: Any, values: tuple[Any, Any], outs: Any) -> Any:
    """What an operator gives of known values; the CPU lacks some kernels of a card, as for histograms of integers."""
    with disable_current_modes():
        try:
            result = func(*values[0], **values[1])
        except RuntimeError as error:
            if "not implemented for" not in str(error) or all(out.device.type == "cpu" for out in tensors_in(outs)):
                raise
            return _NOT_COMPUTED
        if func in _EMPTY:
            result.zero_()
    return result


def _know_gathered(args: Any, out: Any, *, in_place: bool) -> None:
    """Gives integers that ranks gather this rank's own content for all of them."""
    own = list(tensors_in(args[1] if in_place else args[0]))
    value = value_of(own[0]) if len(own) == 1 else None
    if value is None or value.is_floating_point() or value.is_complex() or not value.numel():
        return
    for gathered in tensors_in(args[0]) if in_place else (out,):
        if isinstance(gathered, FakeTensor) and small(gathered) and gathered.dtype == value.dtype:
            with disable_current_modes():
                repeated = value.flatten().repeat(gathered.numel() // value.numel())
                gathered._memfit_value = _Content(repeated.view(gathered.shape))  # type: ignore[attr-defined]


def _memories(args: Any) -> dict[int, _Memory]:
    """The memory of each tensor among the arguments, by the storage of its content, which views of it share."""
    flat = [part for argument in args for part in (argument if isinstance(argument, list | tuple) else (argument,))]
    contents = [tensor.__dict__.get(KNOWN) for tensor in flat if isinstance(tensor, FakeTensor)]
    return {storage_id_of(content.value): content.memory for content in contents if content is not None}


_RANDOM = frozenset({_aten.randint.low, _aten.randint.low_generator})
"""Random integers from their first argument to below their second."""
_PICKS = frozenset(
    {
        _aten.index.Tensor, _aten.index_select.default, _aten.gather.default, _aten.take.default,
        _aten.max.default, _aten.amax.default, _aten.min.default, _aten.amin.default,
        _aten.sort.default, _aten.sort.stable, _aten.topk.default,
    }
)  # fmt: skip
"""What they give, or the first of what they give, are elements of their first argument."""
_REPLACES = frozenset({_aten.scatter_.src, _aten.index_copy_.default, _aten.index_put_.default, _aten.copy_.default})
"""Where as many elements are written as there are, these are what is there."""
_COUNTS = frozenset(
    {_aten.sum.default, _aten.sum.dim_IntList, _aten.count_nonzero.default, _aten.count_nonzero.dim_IntList}
)
"""Of booleans, these count how many hold."""
_ORDERS = frozenset({_aten.lt.Scalar, _aten.le.Scalar, _aten.gt.Scalar, _aten.ge.Scalar})
_IS = frozenset({_aten.eq.Scalar, _aten.ne.Scalar})
_BOUNDS = frozenset(
    {
        _aten.clamp.default, _aten.clamp.Tensor, _aten.clamp_min.default, _aten.clamp_min.Tensor, _aten.maximum.default,
        _aten.clamp_.default, _aten.clamp_.Tensor, _aten.clamp_min_.default, _aten.clamp_min_.Tensor,
    }
)  # fmt: skip
"""What they give is at least a bound, whatever the numbers are."""


def _assume(func: Any, args: Any, kwargs: Any, out: Any) -> None:
    """Follows integers that are not known: where each is assumed to be 0, ``i + 32`` is 32, and a slice from one to the
    other has the width of a real run's. Random ones are the least that they can be; those that
    are picked from known ones, such as the lengths of a batch, the largest. A count of hits is 1: an accuracy that code
    compares with the best one so far, or divides by, is no 0: some of several truth values hold. Of one number that is
    compared with another, the answer is that of the number that a script reads (0.5, or a count). A floating point
    number is assumed to be 0.5; one that code bounds from below by more is assumed to be the bound."""
    if func in ANY and args[0].dtype is torch.bool and args[0].numel() > 1:
        setattr(out, ASSUMED_TRUTH, True)
        return
    if (func in _ORDERS or func in _IS) and isinstance(out, FakeTensor) and out.numel() == 1:
        unknown = ASSUMED_NUMBER if args[0].is_floating_point() and func in _ORDERS else None
        assumed = args[0].__dict__.get(ASSUMED, unknown)
        if assumed is not None:
            with disable_current_modes():
                setattr(out, ASSUMED_TRUTH, bool(func(torch.tensor(assumed), args[1])))
        return
    out = out[0] if isinstance(out, list | tuple) and func in _PICKS else out
    if not (isinstance(out, FakeTensor) and small(out) and (out.dtype in INTEGERS or _is_bounded(func, args, out))):
        return
    if func in _COUNTS and args[0].dtype is torch.bool and args[0].numel():
        setattr(out, ASSUMED, assumed_count())
        return
    if func in _PICKS:
        largest = _largest(args[0])
        if largest is not None:
            setattr(out, ASSUMED, largest)
        return
    if func in _RANDOM:
        setattr(out, ASSUMED, min(args[0] + assumed_integer(out), args[1] - 1))
        return
    if (schema_of(func).is_mutable and func not in _BOUNDS) or UNKNOWN_EFFECT in func.tags or kwargs.get("out"):
        return
    if not (func.is_view or torch.Tag.pointwise in func.tags or func is _aten._to_copy.default):
        return
    arguments: list[Any] = []
    alike = True  # each argument holds one number many times
    for argument in args:
        if isinstance(argument, Tensor):
            known = value_of(argument)
            if not small(argument) or not (argument.dtype in INTEGERS or _may_stand(func, argument, known)):
                return
            alike = alike and (known is None or known.numel() == 1)
        arguments.append(argument)
    if not out.numel():
        return
    if alike and func.is_view and out.dtype == args[0].dtype:
        setattr(out, ASSUMED, assumed_integer(args[0]) if value_of(args[0]) is None else known_item(args[0]))
        return
    with disable_current_modes():
        real = [_content(argument, whole=not alike or func.is_view) for argument in arguments]
        named = {name: value for name, value in kwargs.items() if name != "device"}
        with contextlib.suppress(RuntimeError):  # such as a division by 0
            values = func(*real, **named)
            first = values.flatten()[0]
            if (values.numel() == 1 or bool((values == first).all())) and (
                not out.is_floating_point() or ASSUMED_NUMBER < first < math.inf
            ):
                setattr(out, ASSUMED, first.item())


def _is_bounded(func: Any, args: Any, out: Tensor) -> bool:
    """Whether a floating point result follows from numbers of which a lower bound is known."""
    return out.is_floating_point() and (
        func in _BOUNDS
        or any(
            isinstance(operand, Tensor) and operand.is_floating_point() and ASSUMED in operand.__dict__
            for operand in args
        )
    )


def _may_stand(func: Any, operand: Tensor, known: Tensor | None) -> bool:
    """Whether one number may stand for each floating point number of an operand."""
    return operand.is_floating_point() and (known is not None or ASSUMED in operand.__dict__ or func in _BOUNDS)


def _content(argument: Any, *, whole: bool) -> Any:
    """What stands for an operator's argument: of a tensor its known content, or what each number of it is taken for.

    Args:
        whole: False: one element for all, in as many dimensions, which count where types are promoted.
    """
    if not isinstance(argument, Tensor):
        return argument
    known = value_of(argument)
    if known is not None:
        return known
    shape = argument.shape if whole else (1,) * argument.dim()
    return torch.full(shape, assumed_number(argument), dtype=argument.dtype)


def _largest(tensor: Tensor) -> int | None:
    """The largest of integers that are known, or what each of others is taken for; None where nothing is known."""
    known = value_of(tensor)
    if known is None or not known.numel():
        return tensor.__dict__.get(ASSUMED)
    with disable_current_modes():
        return int(known.max())


def _written(func: Any, args: Any) -> int | None:
    """What each integer of a tensor is taken for after others were written to all of it."""
    if func not in _REPLACES or not isinstance(args[-1], Tensor) or args[-1].numel() != args[0].numel():
        return None
    return _largest(args[-1]) if args[0].dtype in INTEGERS and small(args[0]) else None


def known_item(tensor: Any) -> Any:
    """The number that a known one-element tensor holds; None where it is not known."""
    value = value_of(tensor)
    if value is None:
        return None
    with disable_current_modes():
        return value.item()


def real_arguments(func: Any, args: Any, kwargs: Any) -> tuple[list[Any], dict[str, Any]] | None:
    """An operator's arguments with known content in place of tensors, on the CPU; None where some is not known."""
    tensors = 0
    real: list[Any] = []
    for argument in args:
        if isinstance(argument, Tensor):
            value = value_of(argument)
            if value is None:
                return None
            tensors += 1
            real.append(value)
        elif isinstance(argument, list | tuple) and any(isinstance(part, Tensor) for part in argument):
            values = [value_of(part) if isinstance(part, Tensor) else part for part in argument]
            if any(isinstance(part, Tensor) and value is None for part, value in zip(argument, values, strict=True)):
                return None
            tensors += 1
            real.append(values)
        else:
            real.append(argument)
    if any(isinstance(value, Tensor) for value in kwargs.values()) or (not tensors and func not in _MAKERS):
        return None
    named = {
        name: torch.device("cpu") if name == "device" and value is not None else value for name, value in kwargs.items()
    }
    return real, named
