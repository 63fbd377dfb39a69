"""Nets of timm, torchvision and Transformers by the name that a table of runs has, without weights or network."""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from bench.accuracy_parts import litgpt_nets, torchvision_stand_in
from memfit import toml
from memfit.errors import InputError

if TYPE_CHECKING:
    from bench.accuracy_parts.loop import Loop

CONFIGURATIONS = Path(__file__).resolve().parents[1] / "recipes" / "configurations.toml"


@dataclass(frozen=True, kw_only=True)
class Built:
    """A net and, of a language model, the size of its vocabulary."""

    net: nn.Module
    vocabulary: int = 0


def build_net(loop: Loop) -> Built:
    """The loop's net on the host.

    Raises:
        InputError: the library has no net of that name, or no configuration of it is known.
    """
    if loop.kind == "timm":
        return Built(net=_timm(loop.net, loop.classes, loop.net_arguments))
    if loop.kind == "torchvision":
        return Built(net=_torchvision(loop.net, loop.classes))
    if method := loop.litgpt_method:
        return Built(net=litgpt_nets.build(loop.net, method, loop.net_arguments, loop.quantize))
    return _transformers(loop.net, loop.kind, loop.attention)


def _timm(name: str, classes: int | None, arguments: dict[str, Any]) -> nn.Module:
    with torchvision_stand_in.present():
        import timm

    known = timm.list_models()
    if name not in known:
        name = _timm_name(name, known)
    net: nn.Module = timm.create_model(name, **({} if classes is None else {"num_classes": classes}), **arguments)
    return net


def _timm_name(name: str, known: list[str]) -> str:
    """The present name of a net that was called otherwise once: without underscores, or nearly the same."""
    plain = {re.sub("[^a-z0-9]", "", other): other for other in known}
    same = plain.get(re.sub("[^a-z0-9]", "", name))
    if same is None:
        near = difflib.get_close_matches(name, known, n=1)
        raise InputError(f"timm net {name}", "not in this version", f"write {near[0] if near else 'another'}")
    return same


_LARGE, _SMALL = "MobeNetV3Large", "MobeNetV3Small"
_TORCHVISION = {
    "RegNetX400MF": "regnet_x_400mf", "RegNetY400MF": "regnet_y_400mf", "ConvNeXtBase": "convnext_base",
    "ConvNeXtTiny": "convnext_tiny", "MobileNetV2": "mobilenet_v2", "MnasNet": "mnasnet1_0",
    _LARGE: "mobilenet_v3_large", _SMALL: "mobilenet_v3_small",
}  # fmt: skip
_TEN_CLASSES = ("MnasNet", _LARGE, _SMALL)


def _torchvision(name: str, classes: int | None) -> nn.Module:
    import torchvision.models

    known = torchvision.models.list_models()
    wanted = _TORCHVISION.get(name, name)
    plain = {re.sub("[^a-z0-9]", "", other): other for other in known}
    constructor = plain.get(re.sub("[^a-z0-9]", "", wanted.lower()))
    if constructor is None:
        raise InputError(f"torchvision net {name}", "torchvision has none of that name", "write one of its names")
    if classes is None and name in _TEN_CLASSES:
        classes = 10
    made: nn.Module = torchvision.models.get_model(
        constructor, weights=None, **({} if classes is None else {"num_classes": classes})
    )
    return made


@cache
def configurations() -> dict[str, dict[str, Any]]:
    """Hub name in lower case -> model_type and the entries of its config.json that differ from the defaults."""
    table = toml.loads(CONFIGURATIONS.read_text())
    return {name.lower(): entries for name, entries in table.items()}


def _configuration(name: str) -> dict[str, Any]:
    known = configurations()
    short = name.lower().rpartition("/")[2]
    by_short = {key.rpartition("/")[2]: key for key in known}
    key = name.lower() if name.lower() in known else by_short.get(short)
    if key is None:
        near = difflib.get_close_matches(short, by_short, n=1)
        raise InputError(
            f"net {name}", f"no configuration of it in {CONFIGURATIONS.name}",
            f"add its config.json there{f' (nearest: {near[0]})' if near else ''}",
        )  # fmt: skip
    return known[key]


def _transformers(name: str, kind: str, attention: str | None) -> Built:
    import transformers

    entries = dict(_configuration(name))
    config = transformers.AutoConfig.for_model(entries.pop("model_type"), **entries)
    loader = {
        "causal-lm": transformers.AutoModelForCausalLM,
        "seq2seq-lm": transformers.AutoModelForSeq2SeqLM,
        "encoder": transformers.AutoModel,
    }[kind]
    net: nn.Module = loader.from_config(config, **({} if attention is None else {"attn_implementation": attention}))
    return Built(net=net, vocabulary=config.vocab_size)
