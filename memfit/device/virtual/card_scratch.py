"""Memory that a call takes within itself and that depends on the card: bytes from a description in a word and numbers.

A trace keeps the descriptions of its calls, so that cards on which these bytes alone differ share it
(``memfit.trace.card_calls``). Sources: as of ``memfit.device.virtual.workspace``.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from memfit.device.virtual.card_rules import CardRules

FLOAT = 4
"""Bytes of a float32."""
STATE_OF_FLASH, NUMBER = 16, 8
"""Bytes of the generator's state that flash keeps for backward, and of one number: both kernels of attention keep
another one."""
FLASH_FORWARD, EFFICIENT_BACKWARD, CONVOLUTION_BACKWARD = "flash_forward", "efficient_backward", "convolution_backward"
EITHER_FORWARD, EITHER_BACKWARD = "flash_or_cudnn_forward", "flash_or_cudnn_backward"
"""Words that a description begins with. The numbers behind them are those that the functions of ``_RULES`` take, in
their order."""
FULL, HALF, BRAIN = 32, 16, 17
"""The last number of a convolution: its type (float32, float16, bfloat16)."""


def card_scratch(card: CardRules, call: str) -> int:
    """Bytes that a call takes within itself.

    Args:
        call: its description.
    """
    word, *numbers = call.split(" ")
    return _RULES[word](card, *map(int, numbers))


def rounded_head(head: int) -> int:
    """Width for which flash's kernels take a head of so many channels."""
    return math.ceil(head / 32) * 32 if head <= 192 else 256


def runs_on_tensor_cores(card: CardRules, kind: int) -> bool:
    """Whether a card's convolutions of a type (``FULL`` with TF32, ``HALF``, ``BRAIN``) do."""
    return card.is_at_least(7 if kind == HALF else 8, 0)


def _flash_forward(card: CardRules, batch_heads: int, lq: int, lk: int, head: int) -> int:
    """Partial outputs where flash splits the keys over idle multiprocessors; 0 where it does not.

    The queries are ``batch_heads`` (B x H) x ceil(``lq`` / 64) blocks.
    """
    block = 256 if head <= 64 else 128 if head <= 128 else 64
    splits = card.flash_splits(batch_heads * math.ceil(lq / 64), math.ceil(lk / block))
    return splits * batch_heads * lq * (1 + rounded_head(head)) * FLOAT if splits > 1 else 0


def _efficient_backward(card: CardRules, batch_heads: int, lq: int, lk: int, head: int, value_head: int) -> int:
    """Of half types. On Volta the product of output and its gradient, then a number per row; else a number per row and
    dq (for heads wider than a block, dk and dv too) in float32, in blocks of 64 x 64."""
    per_row = batch_heads * lq * FLOAT
    if card.is_at_least(7, 0) and card.is_at_most(7, 0):
        return batch_heads * lq * value_head * FLOAT + per_row
    blocks = math.ceil(lq / 64) * math.ceil(head / 64) * (64 * 64 * FLOAT + 16)
    if head > 128:
        blocks += math.ceil(lk / 64) * 64 * (math.ceil(head / 64) + math.ceil(value_head / 64)) * 64 * FLOAT
    return per_row + batch_heads * blocks


def _convolution_backward(card: CardRules, copies: int, tensors: int, kind: int) -> int:
    """``copies`` bytes on any card, and ``tensors`` bytes more on tensor cores."""
    return copies + (tensors if runs_on_tensor_cores(card, kind) else 0)


def _either_forward(card: CardRules, batch_heads: int, lq: int, lk: int, head: int) -> int:
    """Flash's, on cards that do not prefer cuDNN's attention, of whose own nothing is known."""
    return 0 if card.prefers_cudnn_attention else _flash_forward(card, batch_heads, lq, lk, head)


def _either_backward(card: CardRules, nbytes: int) -> int:
    return 0 if card.prefers_cudnn_attention else nbytes


_RULES: dict[str, Callable[..., int]] = {
    FLASH_FORWARD: _flash_forward, EFFICIENT_BACKWARD: _efficient_backward, CONVOLUTION_BACKWARD: _convolution_backward,
    EITHER_FORWARD: _either_forward, EITHER_BACKWARD: _either_backward,
}  # fmt: skip
