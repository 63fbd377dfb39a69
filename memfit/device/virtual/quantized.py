"""Weights that ``from_pretrained`` quantizes as it loads them: bitsandbytes' 4-bit and 8-bit ones, by shape."""

from __future__ import annotations

import importlib.util
from typing import Any

import torch
from torch import nn

from memfit.errors import InputError
from memfit.torch_compat.attributes import own_parameters

_LIBRARY = "bitsandbytes"


def quantization_of(name: Any, given: dict[str, Any], config: Any) -> Any:
    """The quantization that ``from_pretrained(name, **given)`` asks for, or the checkpoint has; None without one.

    Raises:
        InputError: shapes of its weights are not known, or bitsandbytes is not installed.
    """
    asked = given.get("quantization_config") or getattr(config, "quantization_config", None)
    if asked is None and not (given.get("load_in_4bit") or given.get("load_in_8bit")):
        return None
    from transformers import BitsAndBytesConfig

    if asked is None:
        asked = {key: value for key, value in given.items() if key.startswith(("load_in_", "bnb_4bit_", "llm_int8_"))}
    if isinstance(asked, dict) and asked.get("quant_method", _LIBRARY) == _LIBRARY:
        asked = BitsAndBytesConfig.from_dict(asked)
    seen = f"from_pretrained({str(name)!r})"
    if not isinstance(asked, BitsAndBytesConfig):
        method = asked.get("quant_method") if isinstance(asked, dict) else type(asked).__name__
        why = f"it quantizes with {method}, and memfit knows the shapes of bitsandbytes' weights alone"
        raise InputError(seen, why, "write quantization_config=BitsAndBytesConfig(...), or load it without one")
    if importlib.util.find_spec(_LIBRARY) is None:
        why = "its quantization_config needs bitsandbytes, which is not installed"
        raise InputError(seen, why, "pip install bitsandbytes, or load it without quantization_config")
    return asked


def quantize(net: nn.Module, quantization: Any) -> nn.Module:
    """The net with quantized layers in the place of its linear ones, on the card where there is one.

    Each weight is copied to the card and quantized there by its class's ``to``, one after another, as in loading.

    Args:
        net: on the CPU.
    """
    from transformers.quantizers import AutoHfQuantizer

    quantizer = AutoHfQuantizer.from_config(quantization, pre_quantized=False)
    before = dict(net.named_modules())
    quantizer.preprocess_model(model=net, device_map=None)
    for path, module in net.named_modules():
        if module is not before.get(path, module):
            _fill(module, before[path])
    quantizer.postprocess_model(net)
    return net.to("cuda" if torch.cuda.is_available() else "cpu")


def _fill(module: nn.Module, original: nn.Module) -> None:
    """Gives a quantized layer, which was made without memory, the weights of the layer that it replaces."""
    for name, weight in original.named_parameters(recurse=False):
        made: Any = getattr(module, name)
        is_plain = type(made) is type(weight)
        own_parameters(module)[name] = (
            weight if is_plain else type(made)(weight.detach(), requires_grad=False, **vars(made))
        )
