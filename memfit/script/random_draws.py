"""The host's random stream, moved on as the operators of a real run move it.

A fake tensor is never filled, so a net that is initialized on the CPU would draw nothing, and the order of a shuffled
loader, which is drawn afterwards, would not be that of the real run. So operators that draw for a fake tensor of the
CPU really draw, for a tensor of the same shape that is dropped, as long as that is cheap.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor

from memfit.torch_compat import DisableTorchDispatch, FakeTensor, arg_tree_leaves, tree_map
from memfit.torch_compat.attributes import schema_of

MOST_DRAWN = 200_000_000
"""Numbers that are drawn in all: about a second of processor time."""
MOST_DRAWN_AT_ONCE = 50_000_000
"""Numbers for one tensor: 200 MB of float32."""
_COSTLY = ("attention", "lstm", "gru", "rnn", "cudnn", "miopen")
"""Parts of the names of operators that compute more than they draw."""


class RandomDraws:
    """Draws what operators on fake tensors of the CPU draw in a real run, until it would take too long."""

    def __init__(self) -> None:
        self._left = MOST_DRAWN

    def follow(self, func: Any, args: Any, kwargs: dict[str, Any]) -> None:
        """Moves the generator on as ``func`` does. Once a draw was too large, all later ones are left out."""
        if not self._left or not _draws(func):
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
