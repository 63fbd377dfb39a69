"""scaled_dot_product_attention as CUDA does it: which kernel is chosen, and what it is given.

The rules are those of ATen/native/transformers/cuda/sdp_utils.cpp and attention.cpp. What each kernel keeps for
backward follows from its own meta kernel and derivative; backward's scratch is in ``memfit.device.virtual.workspace``.
Up to torch 2.13 the efficient kernel takes no grouped heads (pytorch/pytorch pull request 191085 adds them later): in
float32, or with a mask, grouped-query attention is the math kernel's.
A call that is cuDNN's on cards that prefer it and flash's on others is traced as flash's where such cards may share the
trace: the two give the same but for the generator's state (``memfit.trace.attention_kernels``).
Left out: nested tensors, FlashAttention 3 and FP8, deterministic algorithms.
"""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from memfit.device.virtual.card_rules import CardRules, RecordedRules
from memfit.device.virtual.card_scratch import NUMBER, STATE_OF_FLASH
from memfit.device.virtual.patching import appended
from memfit.torch_compat import FakeTensor, disable_current_modes, dispatch_depth, scoped_library
from memfit.torch_compat.attributes import are_transforms_active
from memfit.torch_compat.saved_hooks import top_saved_tensors_hooks

CUDNN, FLASH, EFFICIENT, MATH = "cudnn", "flash", "efficient", "math"
EITHER = "flash or cudnn"
_is_either = [False]
_alike: dict[tuple[Any, ...], bool] = {}
"""By what a call is made with, whether flash and cuDNN give the same."""

_HALF = (torch.float16, torch.bfloat16)
_aten = torch.ops.aten


def choose(
    card: CardRules,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    enable_gqa: bool = False,
) -> str:
    """The kernel that CUDA takes for this call: ``cudnn``, ``flash``, ``efficient`` or ``math``.

    ``flash or cudnn`` where the trace is for cards of both kinds.

    Respects ``torch.nn.attention.sdpa_kernel`` and ``torch.backends.cuda.enable_*_sdp``.
    """
    call = (card, query, key, value, attn_mask, dropout_p, is_causal, enable_gqa)
    can_cudnn = torch.backends.cuda.cudnn_sdp_enabled() and _cudnn(*call)
    if can_cudnn and not dropout_p and _may_share(card, query, key, value):
        flash = torch.backends.cuda.flash_sdp_enabled() and _flash(*call)
        if flash and _gives_alike(query, key, value, is_causal):
            return EITHER
    if can_cudnn and _cudnn_first(card):  # asked where it decides: a trace holds for every card that answers the same
        return CUDNN
    if torch.backends.cuda.flash_sdp_enabled() and _flash(*call):
        return FLASH
    if torch.backends.cuda.mem_efficient_sdp_enabled() and _efficient(*call):
        return EFFICIENT
    return CUDNN if can_cudnn and not torch.backends.cuda.math_sdp_enabled() else MATH


def _cudnn_first(card: CardRules) -> bool:
    return card.prefers_cudnn_attention and not _is_deprioritized()


def _is_deprioritized() -> bool:
    return os.environ.get("TORCH_CUDNN_SDPA_DEPRIORITIZED") == "1"


def _may_share(card: CardRules, *tensors: Tensor) -> bool:
    """Whether other cards may share the trace, as nothing but attention's own backward sees what a call keeps for it.

    No transform does, no dispatch mode of the job's or of a compiler, and no hook of saved tensors but those of
    checkpointing, which drop or detach them.
    """
    if not card.shares_attention or _is_deprioritized():
        return False
    hooks = top_saved_tensors_hooks(True)
    return (
        all(type(tensor) is FakeTensor for tensor in tensors)
        and (hooks is None or hooks[0].__module__ == "torch.utils.checkpoint")
        and not are_transforms_active()
        and isinstance(card, RecordedRules)
        and dispatch_depth() == card.modes
    )


def _gives_alike(query: Tensor, key: Tensor, value: Tensor, is_causal: bool) -> bool:
    """Whether flash and cuDNN give outputs and gradients of the same shapes, strides and bytes."""
    keeps = _trains(query, key, value)
    made_with = tuple((tensor.shape, tensor.stride(), tensor.dtype) for tensor in (query, key, value))
    call = (*made_with, is_causal, keeps)
    if call not in _alike:
        with torch.no_grad(), disable_current_modes():
            try:
                _alike[call] = _compared(query.detach(), key.detach(), value.detach(), is_causal, keeps)
            except Exception:  # this torch knows no shapes of a kernel that the card may not take
                _alike[call] = False
    return _alike[call]


def _compared(query: Tensor, key: Tensor, value: Tensor, is_causal: bool, keeps: bool) -> bool:
    given = (query, key, value)
    flash = _aten._scaled_dot_product_flash_attention(*given, 0.0, is_causal, False)
    cudnn = _aten._scaled_dot_product_cudnn_attention(*given, None, keeps, 0.0, is_causal, False)
    held = [[_bytes(each) for each in kept] for kept in (flash[6:], cudnn[6:])]
    if held != [[STATE_OF_FLASH, NUMBER, 0], [NUMBER, NUMBER, None]] or _bytes(flash[1]) != _bytes(cudnn[1]):
        return False
    if any(isinstance(each, Tensor) for each in (*flash[2:4], *cudnn[2:4])) or not _is_like(flash[0], cudnn[0]):
        return False
    if not keeps:
        return True
    most = (flash[4], flash[5], 0.0, is_causal)
    gradients = (
        _aten._scaled_dot_product_flash_attention_backward(
            flash[0], *given, flash[0], flash[1], None, None, *most, flash[6], flash[7]
        ),
        _aten._scaled_dot_product_cudnn_attention_backward(
            cudnn[0], *given, cudnn[0], cudnn[1], cudnn[6], cudnn[7], None, None, None, *most
        ),
    )
    return all(_is_like(first, second) for first, second in zip(*gradients, strict=True))


def _bytes(tensor: Any) -> int | None:
    return tensor.untyped_storage().nbytes() if isinstance(tensor, Tensor) else None


def _is_like(first: Tensor, second: Tensor) -> bool:
    return (first.shape, first.stride(), first.dtype, _bytes(first)) == (
        second.shape, second.stride(), second.dtype, _bytes(second),
    )  # fmt: skip


def is_either() -> bool:
    """Whether the call of flash that runs now is cuDNN's on cards that prefer that."""
    return _is_either[-1]


def _is_within(card: CardRules, first: tuple[int, int], last: tuple[int, int]) -> bool:
    return card.is_at_least(*first) and card.is_at_most(*last)


def _is_hopper_like(card: CardRules) -> bool:
    return _is_within(card, (9, 0), (9, 0)) or card.has_major(10)


def _has_small_shared_memory(card: CardRules) -> bool:
    return _is_within(card, (8, 6), (8, 9)) or card.is_at_least(12, 0)


def _trains(query: Tensor, key: Tensor, value: Tensor) -> bool:
    return torch.is_grad_enabled() and (query.requires_grad or key.requires_grad or value.requires_grad)


def _last_stride_is_1(tensor: Tensor) -> bool:
    return tensor.size(-1) == 1 or tensor.stride(-1) == 1


def _fused_at_all(query: Tensor, key: Tensor, value: Tensor, enable_gqa: bool, same_kv_heads: bool = True) -> bool:
    """Whether inputs meet what every fused kernel asks for: dense, 4-D, of one type, none empty, with matching
    heads."""
    tensors = (query, key, value)
    if any(t.dim() != 4 or t.layout is not torch.strided or t.numel() == 0 for t in tensors):
        return False
    if not query.dtype is key.dtype is value.dtype or not query.size(0) == key.size(0) == value.size(0):
        return False
    heads = (query.size(1), key.size(1), value.size(1))
    if not enable_gqa:
        return heads[0] == heads[1] == heads[2]
    return heads[0] % heads[1] == 0 and heads[0] % heads[2] == 0 and (heads[1] == heads[2] or not same_kv_heads)


def _flash(
    card: CardRules, query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None, dropout_p: float,
    is_causal: bool, enable_gqa: bool,
) -> bool:  # fmt: skip
    head = query.size(-1)
    if attn_mask is not None or query.dtype not in _HALF or not _is_within(card, (8, 0), (12, 1)):
        return False
    if not _fused_at_all(query, key, value, enable_gqa) or not head == key.size(-1) == value.size(-1) or head > 256:
        return False
    if is_causal and query.size(-2) != key.size(-2):
        return False
    fits_every_backward = head <= 192 or (head > 224 and dropout_p == 0)
    if not fits_every_backward and _trains(query, key, value) and _has_small_shared_memory(card):
        return False
    return all(_last_stride_is_1(t) for t in (query, key, value))


def _efficient(
    card: CardRules, query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None, dropout_p: float,
    is_causal: bool, enable_gqa: bool,
) -> bool:  # fmt: skip
    if not _is_within(card, (5, 0), (12, 1)) or not _fused_at_all(query, key, value, enable_gqa=False):
        return False
    newer = card.is_at_least(8, 0)
    if query.dtype not in (torch.float32, torch.float16) and not (newer and query.dtype is torch.bfloat16):
        return False
    alignment = _gemm_alignment(card, query.dtype)
    if query.size(-1) != key.size(-1) or query.size(-1) % alignment or value.size(-1) % alignment:
        return False
    if newer and any(t.storage_offset() % alignment for t in (query, key, value)):
        return False
    return all(t.stride(-1) == 1 for t in (query, key, value))


def _gemm_alignment(card: CardRules, dtype: torch.dtype) -> int:
    """Elements to which head dimensions must be aligned."""
    half = dtype in _HALF
    if card.is_at_least(8, 0):
        return 8 if half else 4
    return 8 if half and card.has_major(7) else 1


def _cudnn(
    card: CardRules, query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None, dropout_p: float,
    is_causal: bool, enable_gqa: bool,
) -> bool:  # fmt: skip
    if query.dtype not in _HALF or not _is_within(card, (8, 0), (12, 1)):
        return False
    if not _fused_at_all(query, key, value, enable_gqa, same_kv_heads=False):
        return False
    if dropout_p * 16 != math.floor(dropout_p * 16) or (dropout_p and query.size(2) != 1):
        return False
    head, head_v = query.size(3), value.size(3)
    largest = 192 if (head, head_v) == (192, 128) and _is_hopper_like(card) else 128
    if max(head, head_v) > largest or head % 8 or head_v % 8 or key.size(2) == 1:
        return False
    return all(_last_stride_is_1(t) for t in (query, key, value))


def _padded_head(tensor: Tensor) -> Tensor:
    over = tensor.size(-1) % 8
    return pad(tensor, (0, 8 - over)) if over else tensor


def _efficient_mask(mask: Tensor, query: Tensor, key: Tensor) -> Tensor:
    """The mask as the efficient kernel reads it: rows aligned to 8 elements, expanded to (B, H, Lq, Lk)."""
    if mask.stride(-1) != 1 or any(stride % 8 for stride in mask.stride()[:-1]):
        length = mask.size(-1)
        mask = pad(mask, (0, 8 - length % 8))[..., :length]
    return mask.expand(query.size(0), query.size(1), query.size(2), key.size(2))


def attend(
    card: CardRules,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """scaled_dot_product_attention on the card: (B, H, Lq, D), (B, H, Lk, D), (B, H, Lk, Dv) -> (B, H, Lq, Dv)."""
    kernel = choose(card, query, key, value, attn_mask, dropout_p, is_causal, enable_gqa)
    if attn_mask is not None and attn_mask.dtype is torch.bool:
        zero = torch.scalar_tensor(0.0, dtype=query.dtype, device=query.device)
        attn_mask = torch.where(attn_mask, zero, float("-inf"))
    keeps = _trains(query, key, value)
    if kernel == CUDNN:
        return _aten._scaled_dot_product_cudnn_attention(
            query, key, value, attn_mask, keeps, dropout_p, is_causal, False, scale=scale
        )[0]
    if kernel == EITHER:
        with appended(_is_either, True):
            return _aten._scaled_dot_product_flash_attention(query, key, value, 0.0, is_causal, False, scale=scale)[0]
    if kernel == FLASH:
        head = query.size(-1)
        out = _aten._scaled_dot_product_flash_attention(
            _padded_head(query), _padded_head(key), _padded_head(value), dropout_p, is_causal, False,
            scale=head**-0.5 if scale is None else scale,
        )[0]  # fmt: skip
        return out[..., :head] if head % 8 else out
    if kernel == EFFICIENT:
        if attn_mask is not None:
            attn_mask = _efficient_mask(attn_mask, query, key)
        return _aten._scaled_dot_product_efficient_attention(
            query, key, value, attn_mask, keeps, dropout_p, is_causal, scale=scale
        )[0]
    return _aten._scaled_dot_product_attention_math(
        query, key, value, attn_mask, dropout_p, is_causal, None, scale=scale, enable_gqa=enable_gqa
    )[0]


@contextlib.contextmanager
def cuda_attention(card: CardRules) -> Iterator[None]:
    """scaled_dot_product_attention on the virtual device goes through ``attend``."""

    def kernel(*args: Any, **kwargs: Any) -> Tensor:
        return attend(card, *args, **kwargs)

    with scoped_library("aten", "IMPL", "AutogradPrivateUse1") as library:
        library.impl("scaled_dot_product_attention", kernel)
        yield
