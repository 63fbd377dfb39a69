"""Kernels of FlashAttention 3 and 4 where they are not installed: variable-length attention is traced without them.

torchtitan activates the kernels of the card's generation (``torch.nn.attention.activate_flash_attention_impl``), which
are packages built for a card. A trace runs none of them: the tensors that attention allocates and keeps are those of
torch's own operator, ``torch_attn::_varlen_attn``.
"""

from __future__ import annotations

from typing import Any

from memfit.errors import is_installed

PACKAGES = {"FA3": "flash_attn_interface", "FA4": "flash_attn"}
"""The module that each of torch's implementations imports."""


class _Handle:
    """Of an implementation that was activated; there is nothing to take back."""

    def remove(self) -> None: ...


def stand_in_flash_kernels() -> None:
    """Registers an implementation that changes nothing in the place of each that is not installed, for good."""
    try:
        from torch.nn.attention import list_flash_attention_impls, register_flash_attention_impl
    except ImportError:  # an older torch has no such kernels
        return
    for name in list_flash_attention_impls():
        if name in PACKAGES and not is_installed(PACKAGES[name]):
            register_flash_attention_impl(name, register_fn=lambda *args, **kwargs: _Handle())


def packs_rows(model: Any) -> bool:
    """Whether a model attends to packed rows, of variable length."""
    from torchtitan.models.common.attention import VarlenAttention

    return any(isinstance(module, VarlenAttention) for module in model.modules())
