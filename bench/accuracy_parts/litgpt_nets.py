"""litgpt's nets with LoRA, without what its package imports besides (data sets, downloads, loggers)."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

CHUNK = 128
"""Tokens whose logits the head computes at once (``lm_head_chunk_size`` of finetune/lora.py)."""


def build(name: str) -> nn.Module:
    """A net of litgpt's by its configuration's name, with LoRA of rank 8 on queries and values, and the rest frozen."""
    lora = _module()
    rank = {"lora_r": 8, "lora_alpha": 16, "lora_dropout": 0.05, "lora_query": True, "lora_value": True}
    net: nn.Module = lora.GPT(lora.Config.from_name(name, **rank))
    lora.mark_only_lora_as_trainable(net)
    return net


def loss_of(chunks: list[Tensor], targets: Tensor) -> Tensor:
    """The mean cross entropy of the next tokens, chunk by chunk (``chunked_cross_entropy``)."""
    chunks[-1] = chunks[-1][..., :-1, :]
    parts = [part.reshape(-1) for part in targets[..., 1:].split(CHUNK, dim=1)]
    flat = [chunk.reshape(-1, chunk.size(-1)) for chunk in chunks]
    losses = [
        nn.functional.cross_entropy(chunk, part, ignore_index=-1, reduction="none")
        for chunk, part in zip(flat, parts, strict=True)
    ]
    return torch.cat(losses).sum() / targets[..., 1:].numel()


def _module() -> Any:
    """litgpt.lora; its package and its utilities are made here, of what the nets need of them."""
    if "litgpt" not in sys.modules:
        spec = importlib.util.find_spec("litgpt")
        assert spec is not None
        assert spec.origin is not None
        package, utilities = ModuleType("litgpt"), ModuleType("litgpt.utils")
        package.__path__ = [str(Path(spec.origin).parent)]
        utilities.find_multiple = _next_multiple  # type: ignore[attr-defined]
        utilities.map_old_state_dict_weights = lambda *args, **kwargs: None  # type: ignore[attr-defined]
        sys.modules |= {"litgpt": package, "litgpt.utils": utilities}
        import litgpt.model

        package.model, package.GPT = litgpt.model, litgpt.model.GPT  # type: ignore[attr-defined]
    import litgpt.lora

    return litgpt.lora


def _next_multiple(number: int, divisor: int) -> int:
    return -(-number // divisor) * divisor
