"""litgpt's nets, with LoRA, adapters or whole, without what its package imports besides (data, downloads, loggers)."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from bench.accuracy_parts import four_bit_base

CHUNK = 128
"""Tokens whose logits the head computes at once (``lm_head_chunk_size`` of finetune/lora.py)."""


METHODS = ("lora", "adapter", "adapter_v2", "full")
"""How a net is fine-tuned: the script of that name in litgpt's ``finetune``."""
_LORA = {"lora_r": 8, "lora_alpha": 16, "lora_dropout": 0.05, "lora_query": True, "lora_value": True}


def build(name: str, method: str, arguments: dict[str, Any] | None = None, quantize: str = "") -> nn.Module:
    """A net of litgpt's by its configuration's name, with what the method adds, and the rest frozen.

    Args:
        method: one of ``METHODS``.
        arguments: of LoRA, as the script's options are called; they replace its defaults.
        quantize: how its linear layers are quantized, one of ``four_bit_base.MODES``; the net is then made on the card.
            Empty: not, and it is made on the host.
    """
    module = _module("model" if method == "full" else method)
    options = _LORA | (arguments or {}) if method == "lora" else {}
    if method == "full":
        import litgpt.config

        return _net(module, litgpt.config.Config.from_name(name))
    configuration = module.Config.from_name(name, **options)
    with four_bit_base.module_init(quantize) if quantize else contextlib.nullcontext(lambda net: None) as convert:
        net = _net(module, configuration)
    getattr(module, f"mark_only_{method}_as_trainable")(net)
    convert(net)
    return net


def _net(module: Any, configuration: Any) -> nn.Module:
    net: nn.Module = module.GPT(configuration)
    return net


def outputs_of(net: nn.Module, ids: Tensor, method: str) -> Any:
    """Logits in float32: in chunks of tokens, but of a net that is trained whole.

    Lightning's Fabric converts what a net in bf16-true returns to the default type (``HalfPrecision.convert_output``).
    Adapters keep keys and values of their prompt for inference; a training step makes them anew.
    """
    for module in net.modules():
        if hasattr(module, "adapter_kv_cache"):
            module.adapter_kv_cache = None  # type: ignore[assignment]
    if method == "full":
        return net(ids).float()
    return [chunk.float() for chunk in net(ids, lm_head_chunk_size=CHUNK)]


def loss_of(logits: Any, targets: Tensor, method: str) -> Tensor:
    """The mean cross entropy of the next tokens, chunk by chunk (``chunked_cross_entropy``)."""
    if method == "full":
        rows = logits[..., :-1, :].reshape(-1, logits.size(-1))
        flat, parts = list(rows.split(CHUNK)), list(targets[..., 1:].reshape(-1).split(CHUNK))
    else:
        logits[-1] = logits[-1][..., :-1, :]
        parts = [part.reshape(-1) for part in targets[..., 1:].split(CHUNK, dim=1)]
        flat = [chunk.reshape(-1, chunk.size(-1)) for chunk in logits]
    losses = [
        nn.functional.cross_entropy(chunk, part, ignore_index=-1, reduction="none")
        for chunk, part in zip(flat, parts, strict=True)
    ]
    return torch.cat(losses).sum() / targets[..., 1:].numel()


def _module(name: str) -> Any:
    """A module of litgpt; its package and its utilities are made here, of what the nets need of them."""
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
    return importlib.import_module(f"litgpt.{name}")


def _next_multiple(number: int, divisor: int) -> int:
    return -(-number // divisor) * divisor
