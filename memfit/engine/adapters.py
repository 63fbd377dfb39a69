"""Nets within wrappers, and layers that PEFT has put its own in the place of: what a plan for a net means by its paths.

A low-rank adapter (LoRA, Hu et al. 2021, https://arxiv.org/abs/2106.09685) adds B(A(x)) to what a linear layer gives.
Where the layer is cut by its outputs, B is cut as it is; where it is cut by its inputs, A is. The other one stays
whole. PEFT cuts them so too where transformers cuts the layer (``peft.tuners.lora.model``).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

from torch import nn

from memfit.errors import InputError
from memfit.torch_compat.attributes import own_parameters

_INSIDE = ("original_module", "modules_to_save")
"""Children of PEFT's wrapper of a module that is trained whole: the module, and its copies by adapter."""
_LOW_RANK = frozenset({"base_layer", "lora_dropout", "lora_A", "lora_B"})
"""Children of PEFT's linear layer that may hold something."""


def net_of_transformers(net: nn.Module) -> tuple[str, Any]:
    """The net of transformers in a net, with its path; a wrapper, such as PEFT's, gives its attributes for its own.

    Returns:
        The net itself, with an empty path, where it holds none.
    """
    return next(_of_transformers(net), ("", net))


def planned_nets(net: nn.Module, plan: str) -> dict[str, Any]:
    """The nets in a net, or itself, for which transformers has a plan, by path; none of them holds another one.

    Args:
        plan: the attribute with the plan, whose paths are those of the net that has it.
    """
    planned: dict[str, Any] = {}
    for path, module in _of_transformers(net):
        inside = any(not outer or path.startswith(f"{outer}.") for outer in planned)
        if not inside and getattr(module, plan, None):
            planned[path] = module
    return planned or ({"": net} if getattr(net, plan, None) else {})


def _of_transformers(net: nn.Module) -> Iterator[tuple[str, Any]]:
    return ((path, module) for path, module in net.named_modules() if hasattr(type(module), "base_model_prefix"))


def is_linear(module: nn.Module | None) -> bool:
    """Whether a module is a linear layer, or PEFT's around one."""
    return isinstance(module, nn.Linear) or isinstance(getattr(module, "base_layer", None), nn.Linear)


def outside_adapters(net: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Modules of a net by path, without those within adapted ones."""
    adapted: list[str] = []
    for path, module in net.named_modules():
        if any(path.startswith(f"{outer}.") for outer in adapted):
            continue
        if is_adapted(module):
            adapted.append(path)
        yield path, module


def holders_of(net: nn.Module) -> Counter[int]:
    """How many modules of a net hold each parameter, by the parameter's id."""
    return Counter(id(p) for module in net.modules() for p in own_parameters(module).values() if p is not None)


def is_adapted(module: nn.Module) -> bool:
    """Whether PEFT has put a module in the place of another one."""
    return type(module).__module__.startswith("peft.") and any(
        isinstance(getattr(module, name, None), nn.Module) for name in ("base_layer", _INSIDE[0])
    )


def cut_parts(where: str, module: nn.Module, layout: str, write: str) -> Iterator[tuple[str, nn.Module]]:
    """The modules that a layout for a module cuts, by path from there: itself, or those within PEFT's module.

    Args:
        where: the module, for errors.
        write: what to write where its adapter is not carried.

    Raises:
        InputError: its adapter is not carried.
    """
    if not is_adapted(module):
        yield "", module
        return
    wrapped, *beside = _INSIDE
    if isinstance(getattr(module, "base_layer", None), nn.Module):
        _check_low_rank(where, module, write)
        wrapped, *beside = "base_layer", "lora_A" if layout.startswith("rowwise") else "lora_B"
    else:
        _check_children(where, module, frozenset(_INSIDE), write)
    yield wrapped, module.get_submodule(wrapped)
    for name in beside:
        yield from ((f"{name}.{adapter}", part) for adapter, part in module.get_submodule(name).named_children())


def _check_low_rank(where: str, module: nn.Module, write: str) -> None:
    """Raises InputError where PEFT's layer is more than a linear one with low-rank matrices beside it."""
    _check_children(where, module, _LOW_RANK, write)
    variants = [type(variant).__name__ for variant in (getattr(module, "lora_variant", None) or {}).values()]
    if variants:
        raise InputError(where, f"its adapter's variant {variants[0]} is not carried", write)
    if not isinstance(getattr(module, "base_layer", None), nn.Linear):
        raise InputError(where, f"adapters of {type(module.base_layer).__name__} are not carried", write)


def _check_children(where: str, module: nn.Module, carried: frozenset[str], write: str) -> None:
    for name, child in module.named_children():
        if name not in carried and any(True for _ in child.parameters()):
            raise InputError(where, f"its adapter {type(module).__name__} has {name}, which is not carried", write)
