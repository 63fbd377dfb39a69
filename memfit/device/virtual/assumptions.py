"""What a trace assumes where code asks what only data can answer, and the line of the user's code that asked."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor

from memfit.device.virtual.branches import asks_in_for, decides_branch, leaving_answer, passing_answer
from memfit.device.virtual.value_masks import Walks, mask_of, most_true
from memfit.errors import InputError
from memfit.wording import TURNS

ASSUMED = "_memfit_assumed"
"""Attribute of a fake tensor of numbers: the value of each, where that follows from integers that are taken for 0 or
for the least random number, or from a lower bound."""

ASSUMED_NUMBER = 0.5
"""What a floating point number that is not known is taken for."""

HOLDS_IF_FINITE = "_memfit_holds_if_finite"
"""Attribute of a fake tensor of one truth value: it is true of every finite number, as ``loss < float("inf")`` is."""

ASSUMED_TRUTH = "_memfit_assumed_truth"
"""Attribute of a fake tensor of one truth value: the answer where a number that is not known is taken for 0.5, and some
of several truth values hold."""

_BACKWARD = "the backward"
DOUBT = "where that is a size, a run needs more than predicted"
"""The end of what is said of an integer that was assumed."""

MEMORY_DOUBT = "where that decides a size, a run needs more or less than predicted"
"""The end of what is said of memory that code asked for."""

MOST_PER_LINE = 10_000
"""Answers that one line of a user's code may ask for within one call of a module, or outside of all: past it, it is a
loop that waits for data. Each layer of a mixture of experts asks for each of its experts anew."""
_MOST_IN_ALL = 1_000_000
"""Answers that one line may ask for at all: a loop may wait for what a module answers."""

_integer = [0]


@contextmanager
def unknown_integers(answer: int) -> Iterator[None]:
    """Inside, an integer that is not known is taken for this one, not for 0."""
    _integer.append(answer)
    try:
        yield
    finally:
        _integer.pop()


def unknown_integer() -> int:
    """What an integer that is not known is taken for, as the innermost ``unknown_integers`` has it."""
    return _integer[-1]


def assumed_integer(tensor: Tensor) -> int:
    """What one integer that is not known is taken for."""
    assumed: int = tensor.__dict__.get(ASSUMED, _integer[-1])
    return assumed


def assumed_number(tensor: Tensor) -> float:
    """What one number that is not known is taken for: an integer, or 0.5 or the lower bound that code gave."""
    if not tensor.is_floating_point():
        return assumed_integer(tensor)
    assumed: float = tensor.__dict__.get(ASSUMED, ASSUMED_NUMBER)
    return assumed


def assumed_count() -> int:
    """What a count of hits among unknown values is taken for: one more than an integer of which nothing is known."""
    return _integer[-1] + 1


PLANNED, EAGER = "planned", "eager"
"""How compiled code is traced: with the buffers of inductor's plan, or as it was written."""
_COMPILED = {
    PLANNED: "compiled code takes the buffers that the code of torch's inductor allocates; not validated on a card",
    EAGER: "compiled code takes what it does as eager code, which was validated with vision transformers alone",
}

OURS = tuple(f"{folder}{os.sep}" for folder in (Path(torch.__file__).parent, Path(__file__).parents[2]))
"""What the files of torch and of memfit begin with; those of torchvision or torchtitan do not."""
_OPTIMIZERS = str(Path(torch.optim.__file__).parent)
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
    ends_loop: bool = False
    """True where the answer ends a loop that waits for data."""
    share: str = ""
    """Where the elements of ``most`` are an equal share: of how many, and for each of how many values."""


class Assumptions:
    """What a trace assumed of data, by place."""

    def __init__(self) -> None:
        self.given: dict[tuple[str, int], str] = {}
        """Answers that a person gave, by file and line."""
        self.compiled: set[str] = set()
        """How compiled code was traced: PLANNED, EAGER or both."""
        self.of_ranks: list[str] = []
        """Lines about what other ranks were taken to do, that decides sizes on this one."""
        self._of_memory: dict[str, None] = {}
        """Lines about code that asked what lies on the card, which is answered as if nothing did."""
        self._of_kernels: dict[str, None] = {}
        """Lines about kernels that are traced without what they compute."""
        self.walks = Walks()
        """Lines that select by one value after another."""
        self.latest = ""
        """The last answer that may decide a size, as a sentence about a script that failed after it."""
        self.module_call: Callable[[], int] = lambda: 0
        """The number of the call of a module whose own code runs; 0 outside of all."""
        self._times: dict[tuple[str, str, str, bool, int, bool, str], int] = {}
        self._latest_asks: dict[tuple[str, str], tuple[int, int]] = {}
        """By operator and place, the call of a module that asked last, and how often it has."""

    def answer(self, value: Any, where: str) -> Any:
        """The value that was given for this place, in the type of ``value``; ``value`` where none was.

        Raises:
            InputError: what was given is no value of that type.
        """
        file, _, line = where.rpartition(":")
        for (name, number), given in self.given.items():
            if number == int(line or 0) and _is(file, name):
                return _as_given(f"{name}:{number}", given, type(value))
        return value

    def note_memory(self, function: str) -> None:
        """Notes that code outside torch and memfit asks a function of ``torch.cuda`` what lies on the card."""
        where, users = source_line()
        if users:
            self._of_memory[f"{where}: {function}() was answered as on an empty card; {MEMORY_DOUBT}"] = None

    def note_kernel(self, line: str) -> None:
        """Notes what a trace leaves out of a kernel."""
        self._of_kernels[line] = None

    def count(self, operator: str, mask: Tensor) -> int:
        """How many elements of a mask are taken for other than zero, which is noted: as many as a person gave for the
        line; an equal share, where the line selects by one value of integers after another; else all that can be."""
        where, _ = source_line()
        of_values, most, share = mask_of(mask), most_true(mask), ""
        if of_values is not None:
            divisor = 1
            if of_values.values == 1:
                divisor = self.walks.divisor(of_values.integers, of_values.value, _place())
            share = f"{of_values.most:,} for each of {divisor} values" if divisor > 1 else ""
            most = min(most, -(-of_values.most // divisor))
        given = self._given(where)
        if given is not None and given.isdigit():
            self.note(operator, f"{min(int(given), mask.numel())}, as given")
            return min(int(given), mask.numel())
        self.note(operator, f"{most}, an equal share of {share}" if share else f"all {most}", most=most, share=share)
        return most

    def _given(self, where: str) -> str | None:
        """What a person gave for a place, as it was written."""
        file, _, line = where.rpartition(":")
        places = (given for (name, number), given in self.given.items() if f"{number}" == line and _is(file, name))
        return next(places, None)

    def note(
        self,
        operator: str,
        answer: str,
        *,
        doubtful: bool = False,
        most: int = 0,
        ends_loop: bool = False,
        share: str = "",
    ) -> None:
        """Raises:
        InputError: the same line of the user's code asks for the 10,001st time in one call of a module.
        """
        where, users = source_line()
        entry = (operator, answer, where, doubtful, most, ends_loop, share)
        if users and (doubtful or most):
            given = f"; if a run gives another number, write --assume {where}=N" if doubtful else ""
            self.latest = f"a trace has no data: {operator} at {where} was taken to give {answer}{given}"
        times = self._times[entry] = self._times.get(entry, 0) + 1
        call = self.module_call()
        of_call, asks = self._latest_asks.get((operator, where), (call, 0))
        asks = asks + 1 if of_call == call else 1
        self._latest_asks[operator, where] = call, asks
        if users and (asks > MOST_PER_LINE or times > _MOST_IN_ALL):
            raise InputError(
                f"{where}: {operator} was asked {min(times - 1, _MOST_IN_ALL):,} times",
                f"a trace has no data, so it is always answered {answer}, and a loop that waits for another never ends",
                "give the loop a fixed number of rounds while torch tensors are fake, or trace without it",
            )

    def __iter__(self) -> Any:
        for (operator, answer, where, doubtful, most, ends_loop, share), times in self._times.items():
            yield Assumption(
                operator=operator, answer=answer, where=where, doubtful=doubtful, most=most, times=times,
                ends_loop=ends_loop, share=share,
            )  # fmt: skip

    def of_sizes(self) -> tuple[str, ...]:
        """A line for each place whose answer decides sizes: the prediction is too high there, or too low."""
        most: dict[tuple[str, str], tuple[int, str]] = {}
        doubtful = []
        for assumption in self:
            if assumption.most:
                place = assumption.where, assumption.operator
                most[place] = max((assumption.most, assumption.share), most.get(place, (0, "")))
            elif assumption.ends_loop:
                doubtful.append(f"{assumption.where}: a loop's condition was answered {assumption.answer}; {TURNS}")
            elif assumption.doubtful:
                doubtful.append(
                    f"{assumption.where}: {assumption.operator}() was answered {assumption.answer}; {DOUBT}"
                )
        bounds = [
            f"{where}: {operator} was taken to find {count:,}, an equal share of {share}; "
            "a run needs more where one value has more"
            if share
            else f"{where}: {operator} was taken to find all {count:,}; a run needs less where its data has fewer"
            for (where, operator), (count, share) in most.items()
        ]
        return (
            *bounds,
            *doubtful,
            *self._of_memory,
            *self.of_ranks,
            *self._of_kernels,
            *(_COMPILED[how] for how in sorted(self.compiled)),
        )

    def __len__(self) -> int:
        return len(self._times)


def _is(file: str, name: str) -> bool:
    """Whether a person means this file by a name."""
    return file == name or file.endswith("/" + name)


_ANSWERS = {bool: "True or False", int: "a whole number", float: "a number", complex: "a number"}
"""What a person may give for each type of value."""


def _as_given(place: str, given: str, kind: type) -> Any:
    if kind is bool and given in ("True", "False"):
        return given == "True"
    with suppress(ValueError):
        if kind is not bool:
            return kind(given)
    example = "True" if kind is bool else "4"
    raise InputError(
        f"--assume {place}={given}", f"the line asks for {_ANSWERS[kind]}", f"write --assume {place}={example}"
    )


def assumed_truth(tensor: Tensor) -> tuple[bool, bool]:
    """(what one truth value that is not known is taken for, whether that ends a loop).

    It is the answer with which the check that asks goes on. Elsewhere a condition that would leave a loop does not
    hold, nor does one without which a loop might never end, nor one that a function returns, nor one of which nothing
    is known. Torch's own code gets the last one of these, but for its optimizers, which ask as a user's code does.
    """
    frame = _asking_optimizer() or _asking()[0]
    passing = passing_answer(frame) if frame is not None else None
    if passing is not None or HOLDS_IF_FINITE in tensor.__dict__:
        return passing is not False, False
    if frame is None or not decides_branch(frame):
        return False, False
    leaving, holds = leaving_answer(frame), tensor.__dict__.get(ASSUMED_TRUTH, False)
    if leaving is None or (leaving is False and asks_in_for(frame)):
        return holds, leaving is False and not holds
    return False, leaving is False


def source_line() -> tuple[str, bool]:
    """``file:line`` of the innermost frame outside torch and memfit, and True; failing that, of the caller in torch, or
    ``the backward``, whose threads on a card have no frames.

    What called the trace, such as a script or the standard library, is no code of a job.
    """
    frame, innermost = _asking()
    return (
        (f"{frame.f_code.co_filename}:{frame.f_lineno}", True) if frame is not None else (innermost or _BACKWARD, False)
    )


def _place() -> str:
    """The line that asks, and those that called its function, as far as torch's code: one module's forward."""
    frame, _ = _asking()
    lines = []
    while frame is not None and not frame.f_code.co_filename.startswith(OURS):
        lines.append(f"{frame.f_code.co_filename}:{frame.f_lineno}")
        frame = frame.f_back
    return " < ".join(lines)


def _asking_optimizer() -> FrameType | None:
    """The frame of torch's optimizers that asks, unless a closure that it calls does."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and (name := frame.f_code.co_filename).startswith(OURS):
        if name.startswith(_OPTIMIZERS):
            return frame
        frame = frame.f_back
    return None


def _asking() -> tuple[FrameType | None, str]:
    """The innermost frame outside torch and memfit, or None and where torch was called."""
    frame: Any = sys._getframe(1)
    innermost = ""
    while frame is not None:
        name = frame.f_code.co_filename
        if name.startswith(_TRACES):
            break
        if not name.startswith(OURS):
            if not name.startswith("<") and frame.f_code.co_name != "__torch_dispatch__":
                return frame, innermost
        elif not innermost and name.startswith(OURS[0]) and not name.endswith(("_ops.py", "_stats.py")):
            innermost = f"{name}:{frame.f_lineno}"
        frame = frame.f_back
    return None, innermost
