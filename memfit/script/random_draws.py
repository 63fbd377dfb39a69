"""The host's random stream, moved on as the operators of a real run move it.

A fake tensor is never filled, so a net that is initialized on the CPU would draw nothing, and the order of a shuffled
loader, which is drawn afterwards, would not be that of the real run. So operators that draw for a fake tensor of the
CPU really draw, for a tensor of the same shape that is dropped, as long as that is cheap. ``trunc_normal_`` draws again
as often as the real tensor asks for it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor

from memfit.device.virtual.patching import replaced
from memfit.torch_compat import (
    DisableTorchDispatch,
    FakeTensor,
    TorchDispatchMode,
    arg_tree_leaves,
    disable_current_modes,
    tree_map,
)
from memfit.torch_compat.attributes import TRUNCATED_NORMAL, schema_of
from memfit.trace.constant_values import know

MOST_DRAWN = 200_000_000
"""Numbers that are drawn in all: about a second of processor time."""
MOST_DRAWN_AT_ONCE = 50_000_000
"""Numbers for one tensor: 200 MB of float32."""
_ANY = torch.ops.aten.any.default
_COSTLY = ("attention", "lstm", "gru", "rnn", "cudnn", "miopen")
"""Parts of the names of operators that compute more than they draw."""


class RandomDraws:
    """Draws what operators on fake tensors of the CPU draw in a real run, until it would take too long."""

    def __init__(self) -> None:
        self._left = MOST_DRAWN
        self._is_paused = False

    def follow(self, func: Any, args: Any, kwargs: dict[str, Any]) -> None:
        """Moves the generator on as ``func`` does. Once a draw was too large, all later ones are left out."""
        if not self._left or self._is_paused or not _draws(func):
            return
        tensors = [value for value in arg_tree_leaves(*args, **kwargs) if isinstance(value, Tensor)]
        if not tensors or not all(_is_plain(value) and value.device.type == "cpu" for value in tensors):
            return
        count = sum(value.numel() for value in tensors)
        if count > min(self._left, MOST_DRAWN_AT_ONCE):
            self._left = 0
            return
        self._left -= count
        with DisableTorchDispatch():
            given, named = tree_map(_filled, (args, kwargs))
            func(*given, **named)

    @contextmanager
    def rejections(self) -> Iterator[None]:
        """A context in which ``trunc_normal_`` of a fake tensor of the CPU makes as many rounds as a real one does."""
        original = getattr(torch.nn.init, TRUNCATED_NORMAL)
        with replaced(torch.nn.init, **{TRUNCATED_NORMAL: self._truncated(original)}):
            yield

    def _truncated(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def call(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
            is_drawn = isinstance(tensor, FakeTensor) and tensor.device.type == "cpu" and not self._is_paused
            if not is_drawn or tensor.numel() > min(self._left, MOST_DRAWN_AT_ONCE):
                return original(tensor, *args, **kwargs)
            answers: list[bool] = []
            with disable_current_modes(), _AnswersNoted(answers):
                original(_filled(tensor), *args, **kwargs)
            self._left -= min(self._left, tensor.numel() * max(1, len(answers)))
            self._is_paused = True
            try:
                with _AnswersKnown(answers):
                    return original(tensor, *args, **kwargs)
            finally:
                self._is_paused = False

        return call


class _AnswersNoted(TorchDispatchMode):
    """Notes whether any of a mask's elements hold, at each question."""

    def __init__(self, answers: list[bool]) -> None:
        super().__init__()
        self._answers = answers

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func is _ANY:
            self._answers.append(bool(out))
        return out


class _AnswersKnown(TorchDispatchMode):
    """Gives the same answers to the same questions about fake tensors."""

    def __init__(self, answers: list[bool]) -> None:
        super().__init__()
        self._answers = list(answers)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func is _ANY and self._answers:
            with disable_current_modes():
                know(out, torch.tensor(self._answers.pop(0)))
        return out


@cache
def _draws(func: Any) -> bool:
    name = schema_of(func).name
    return torch.Tag.nondeterministic_seeded in func.tags and not any(part in name for part in _COSTLY)


def _is_plain(value: Tensor) -> bool:
    """Whether it is one tensor, not a subclass that holds others."""
    return isinstance(value, FakeTensor) or type(value) is Tensor


def _filled(value: Any) -> Any:
    """A real tensor of the same layout in place of a fake one: probabilities of one half, or ones."""
    if not isinstance(value, FakeTensor):
        return value
    made = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype)
    return made.fill_(0.5 if value.dtype.is_floating_point else 1)
