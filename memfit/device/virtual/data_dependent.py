"""Answers to questions that only data can answer: ``.item()``, ``if t > 0``, ``nonzero``, ``x[mask]`` …

A trace has no data. Where the answer changes no shape, a harmless value is given; where it is a size, the largest
one possible. Every answer is noted with the line of the user's code that asked, as an assumption of the prediction.
Works for fake tensors on any device.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor

from memfit.device.virtual.raising_branch import passing_answer
from memfit.errors import InputError
from memfit.torch_compat import FakeTensor, disable_current_modes

NOT_HANDLED: Any = object()
"""What ``answer`` returns for an operator that asks nothing of data."""

ASSUMED = "_memfit_assumed"
"""Attribute of a fake tensor of integers: the value of each, where that follows from integers that are taken for 0 or
for the least random number."""

HOLDS_IF_FINITE = "_memfit_holds_if_finite"
"""Attribute of a fake tensor of one truth value: it is true of every finite number, as ``loss < float("inf")`` is."""

DOUBT = "where that is a size, a run needs more than predicted"
"""The end of what is said of an integer that was assumed."""

MOST_PER_LINE = 10_000
"""Answers that one line of a user's code may ask for: past it, it is a loop that waits for data."""

_integer = [0]


@contextmanager
def unknown_integers(answer: int) -> Iterator[None]:
    """Inside, an integer that is not known is taken for this one, not for 0."""
    _integer.append(answer)
    try:
        yield
    finally:
        _integer.pop()


def assumed_integer(tensor: Tensor) -> int:
    """What one integer that is not known is taken for."""
    assumed: int = tensor.__dict__.get(ASSUMED, _integer[-1])
    return assumed


_aten = torch.ops.aten
_OURS = (str(Path(torch.__file__).parent), str(Path(__file__).parents[2]))
_TRACES = str(Path(__file__).parents[2] / "trace" / "step.py")


@dataclass(frozen=True, kw_only=True)
class Assumption:
    """One place where a trace assumed data."""

    operator: str
    answer: str
    """The assumed value, or the assumed size."""
    where: str
    """``file:line`` of the code that asked."""
    doubtful: bool
    """True where the answer is an integer that code may use as a size."""
    most: int
    """Elements taken, where the answer is how many there are: as many as there can be. 0 for another answer."""
    times: int


class Assumptions:
    """What a trace assumed of data, by place."""

    def __init__(self) -> None:
        self.given: dict[tuple[str, int], str] = {}
        """Answers that a person gave, by file and line."""
        self._times: dict[tuple[str, str, str, bool, int], int] = {}

    def answer(self, value: Any, where: str) -> Any:
        """The value that was given for this place, in the type of ``value``; ``value`` where none was."""
        file, _, line = where.rpartition(":")
        for (name, number), given in self.given.items():
            if number == int(line or 0) and (file == name or file.endswith("/" + name)):
                return given == "True" if type(value) is bool else type(value)(given)
        return value

    def note(self, operator: str, answer: str, *, doubtful: bool = False, most: int = 0) -> None:
        """Raises:
        InputError: the same line of the user's code asks for the 10,001st time.
        """
        where, users = source_line()
        entry = (operator, answer, where, doubtful, most)
        times = self._times[entry] = self._times.get(entry, 0) + 1
        if users and times > MOST_PER_LINE:
            raise InputError(
                f"{where}: {operator} was asked {MOST_PER_LINE} times",
                f"a trace has no data, so it is always answered {answer}, and a loop that waits for another never ends",
                "give the loop a fixed number of rounds while torch tensors are fake, or trace without it",
            )

    def __iter__(self) -> Any:
        for (operator, answer, where, doubtful, most), times in self._times.items():
            yield Assumption(operator=operator, answer=answer, where=where, doubtful=doubtful, most=most, times=times)

    def of_sizes(self) -> tuple[str, ...]:
        """A line for each place whose answer decides sizes: the prediction is too high there, or too low."""
        most: dict[tuple[str, str], int] = {}
        doubtful = []
        for assumption in self:
            if assumption.most:
                most[assumption.where, assumption.operator] = max(
                    assumption.most, most.get((assumption.where, assumption.operator), 0)
                )
            elif assumption.doubtful:
                doubtful.append(
                    f"{assumption.where}: {assumption.operator}() was answered {assumption.answer}; {DOUBT}"
                )
        bounds = [
            f"{where}: {operator} was taken to find all {count:,}; a run needs less where its data has fewer"
            for (where, operator), count in most.items()
        ]
        return (*bounds, *doubtful)

    def __len__(self) -> int:
        return len(self._times)


def _passing_answer() -> bool | None:
    """The answer with which the check that asks goes on, where it is one."""
    frame, _ = _asking()
    return passing_answer(frame) if frame is not None else None


def source_line() -> tuple[str, bool]:
    """``file:line`` of the innermost frame outside torch and memfit, and True; failing that, of the caller in torch.

    What called the trace, such as a script or the standard library, is no code of a job.
    """
    frame, innermost = _asking()
    return (f"{frame.f_code.co_filename}:{frame.f_lineno}", True) if frame is not None else (innermost, False)


def _asking() -> tuple[FrameType | None, str]:
    """The innermost frame outside torch and memfit, or None and where torch was called."""
    frame: Any = sys._getframe(1)
    innermost = ""
    while frame is not None:
        name = frame.f_code.co_filename
        if name.startswith(_TRACES):
            break
        if not name.startswith(_OURS):
            if not name.startswith("<") and frame.f_code.co_name != "__torch_dispatch__":
                return frame, innermost
        elif not innermost and name.startswith(_OURS[0]) and not name.endswith(("_ops.py", "_stats.py")):
            innermost = f"{name}:{frame.f_lineno}"
        frame = frame.f_back
    return None, innermost


def _item(assumptions: Assumptions, tensor: Tensor) -> Any:
    if isinstance(tensor, FakeTensor) and tensor.constant is not None:
        return NOT_HANDLED
    if tensor.dtype is torch.bool:
        passing = _passing_answer()
        value: Any = HOLDS_IF_FINITE in tensor.__dict__ if passing is None else passing
    elif tensor.is_floating_point():
        value = 0.5
    else:
        value = complex(0.5) if tensor.is_complex() else assumed_integer(tensor)
    value = assumptions.answer(value, source_line()[0])
    assumptions.note("item", repr(value), doubtful=type(value) is int)
    return value


def _all_true(assumptions: Assumptions, tensor: Tensor) -> Tensor:
    """Answers True: torch asks whether the arguments of a distribution are valid."""
    assumptions.note("_is_all_true", "True")
    answered = torch.ones((), dtype=torch.bool, device=tensor.device)
    with disable_current_modes():
        answered.constant = torch.tensor(True)  # type: ignore[attr-defined]
    return answered


def _not_left_aligned(assumptions: Assumptions, tensor: Tensor, mask: Tensor) -> bool:
    """Whether nn.TransformerEncoder may leave padding out in evaluation: with it, as many elements are computed as a
    batch can have."""
    assumptions.note("_nested_tensor_from_mask_left_aligned", "False")
    return False


def _same(assumptions: Assumptions, first: Tensor, second: Tensor, *rest: Any, **named: Any) -> bool:
    same = first.shape == second.shape
    assumptions.note("equal", repr(same))
    return same


def _nonzero(assumptions: Assumptions, tensor: Tensor) -> Tensor:
    assumptions.note("nonzero", f"all {tensor.numel()}", most=tensor.numel())
    return torch.empty((tensor.numel(), tensor.dim()), dtype=torch.int64, device=tensor.device)


def _masked_select(assumptions: Assumptions, tensor: Tensor, mask: Tensor) -> Tensor:
    most = torch.broadcast_shapes(tensor.shape, mask.shape).numel()
    assumptions.note("masked_select", f"all {most}", most=most)
    return torch.empty((most,), dtype=tensor.dtype, device=tensor.device)


def _index(assumptions: Assumptions, tensor: Tensor, indices: Any) -> Any:
    """x[mask]: every element is selected. As in a real run, the mask first becomes integer indices."""
    if not any(i is not None and i.dtype in (torch.bool, torch.uint8, torch.int8) for i in indices):
        return NOT_HANDLED
    positions: list[Tensor | None] = []
    for index in indices:
        if index is None or index.dtype not in (torch.bool, torch.uint8, torch.int8):
            positions.append(index)
        else:
            assumptions.note("index by a mask", f"all {index.numel()}", most=index.numel())
            positions_of_mask = torch.empty((index.numel(), index.dim()), dtype=torch.int64, device=index.device)
            positions.extend(positions_of_mask.unbind(1))
    return _aten.index.Tensor(tensor, positions)


def _unique(assumptions: Assumptions, tensor: Tensor, *flags: bool, **named: bool) -> tuple[Tensor, Tensor, Tensor]:
    """As many different values as elements, with the inverse and the counts where they are asked for."""
    assumptions.note("unique", f"all {tensor.numel()}", most=tensor.numel())
    inverse = named.get("return_inverse", flags[1] if len(flags) > 1 else False)
    counts = named.get("return_counts", flags[2] if len(flags) > 2 else False)
    places = torch.empty(tensor.shape if inverse else (0,), dtype=torch.int64, device=tensor.device)
    times = torch.empty((tensor.numel() if counts else 0,), dtype=torch.int64, device=tensor.device)
    return torch.empty((tensor.numel(),), dtype=tensor.dtype, device=tensor.device), places, times


def _ctc_loss(
    assumptions: Assumptions, log_probs: Tensor, targets: Tensor, *rest: Any, **named: Any
) -> tuple[Tensor, Tensor]:
    """(loss of each sample, alignments): the longest target is the targets' width, or all of them put together."""
    longest = targets.shape[-1]
    assumptions.note("ctc_loss", f"targets of {longest}")
    time, batch = log_probs.shape[0], log_probs.shape[1] if log_probs.dim() == 3 else 1
    loss = torch.empty((batch,), dtype=log_probs.dtype, device=log_probs.device)
    return loss, torch.empty((batch, time, 2 * longest + 1), dtype=log_probs.dtype, device=log_probs.device)


def _ctc_loss_backward(assumptions: Assumptions, grad: Tensor, log_probs: Tensor, *rest: Any, **named: Any) -> Tensor:
    return torch.empty_like(log_probs)


def _split(assumptions: Assumptions, tensor: Tensor, sizes: Any, dim: int = 0) -> Any:
    """Parts whose sizes were read from a tensor (experts, each with its tokens): equal ones."""
    length = tensor.shape[dim]
    if sum(sizes) == length or any(sizes):
        return NOT_HANDLED
    assumptions.note("split by sizes from data", f"{len(sizes)} equal parts of {length}")
    each, more = divmod(length, len(sizes))
    return _aten.split_with_sizes.default(tensor, [each + (i < more) for i in range(len(sizes))], dim)


def _refused(name: str) -> Callable[..., Any]:
    def refuse(assumptions: Assumptions, *args: Any, **kwargs: Any) -> Any:
        raise InputError(
            f"{name} at {source_line()[0]}",
            "the size of its result depends on data, which a trace does not have",
            "write this part of the job with sizes that follow from the batch's shape",
        )

    return refuse


_HANDLERS: dict[Any, Callable[..., Any]] = {
    _aten._local_scalar_dense.default: _item,
    _aten._is_all_true.default: _all_true,
    _aten._nested_tensor_from_mask_left_aligned.default: _not_left_aligned,
    _aten._nested_tensor_from_mask.default: _refused("_nested_tensor_from_mask"),
    _aten.equal.default: _same,
    _aten.allclose.default: _same,
    _aten.nonzero.default: _nonzero,
    _aten.masked_select.default: _masked_select,
    _aten.index.Tensor: _index,
    _aten._unique2.default: _unique,
    _aten.split_with_sizes.default: _split,
    _aten.unique_dim.default: _refused("unique"),
    _aten.unique_consecutive.default: _refused("unique_consecutive"),
    _aten.bincount.default: _refused("bincount"),
    _aten.repeat_interleave.Tensor: _refused("repeat_interleave"),
    _aten._ctc_loss.Tensor: _ctc_loss,
    _aten._ctc_loss.default: _ctc_loss,
    _aten._ctc_loss_backward.default: _ctc_loss_backward,
    _aten._ctc_loss_backward.Tensor: _ctc_loss_backward,
    _aten._pack_padded_sequence.default: _refused("pack_padded_sequence"),
}


def asks_data(func: Any) -> bool:
    """Whether ``answer`` may have something to say about this operator."""
    return func in _HANDLERS


def answer_operator(func: Any, args: Any, kwargs: Any, assumptions: Assumptions) -> Any:
    """The result of a data-dependent operator on fake tensors, or NOT_HANDLED. For use in a dispatch mode.

    Allocations inside (the indices of ``x[mask]``) are made under the modes that are active where this is called:
    call it ``with mode:`` to see them.

    Raises:
        InputError: an operator whose size cannot be bounded sensibly, or an endless loop; names the line.
    """
    handler = _HANDLERS.get(func)
    if handler is None or not _asks_a_fake(args):
        return NOT_HANDLED
    return handler(assumptions, *args, **kwargs)


def _asks_a_fake(args: Any) -> bool:
    """DeviceMesh and others ask real tensors, which have answers of their own."""
    return any(isinstance(arg, FakeTensor) for arg in args)
