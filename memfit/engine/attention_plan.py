"""A tensor-parallel plan that follows from a net's modules: attention and feed-forward as diffusers writes them.

- Attention: linear layers ``to_q``, ``to_k``, ``to_v`` and ``to_out``, and a count of ``heads`` or ``num_heads``, by
  which it splits what the first three give. Each rank has whole heads. Of joint attention (Esser et al. 2024,
  https://arxiv.org/abs/2403.03206) the layers of the second stream too: ``add_q_proj``, ``add_k_proj``,
  ``add_v_proj`` and ``to_add_out``.
- Feed-forward: diffusers' ``FeedForward``, and an ``nn.Sequential`` of a linear layer, what computes each element by
  itself, and a linear layer.
- Modulation (adaLN, Peebles and Xie 2023): an ``nn.Sequential`` of an activation and a linear layer, whose output is
  gathered. It has one row for each sample, and may be a third of a net's weights.

All other modules stay whole. Megatron's cut: Shoeybi et al. 2019, https://arxiv.org/abs/1909.08053.
"""

from __future__ import annotations

from collections.abc import Iterator, Set
from typing import Any

from torch import nn

from memfit.engine.adapters import is_linear
from memfit.errors import InputError

PROJECTIONS = ("to_q", "to_k", "to_v")
ADDED, ADDED_OUTPUT = ("add_q_proj", "add_k_proj", "add_v_proj"), "to_add_out"
"""Layers of a second stream of tokens, such as the text's, whose heads attend with those of the first."""
COUNTS = ("heads", "num_heads")
WIDTHS = {"inner_dim": "to_q", "inner_kv_dim": "to_k"}
"""Numbers of attention that are the width of all its heads, and the layer that gives them."""
BESIDE = (*PROJECTIONS, "to_out", "group_norm", "spatial_norm", "norm_cross")
"""Children of attention that hold parameters and are carried: norms of its whole input among them."""
ACTIVATIONS = (
    nn.CELU, nn.ELU, nn.GELU, nn.Hardsigmoid, nn.Hardswish, nn.Hardtanh, nn.LeakyReLU, nn.LogSigmoid, nn.Mish, nn.ReLU,
    nn.ReLU6, nn.SELU, nn.SiLU, nn.Sigmoid, nn.Softplus, nn.Softsign, nn.Tanh,
)  # fmt: skip
"""Modules of torch without parameters that compute each element by itself."""
DIFFUSERS = {"GELU": 1, "ApproximateGELU": 1, "LinearActivation": 1, "GEGLU": 2, "SwiGLU": 2}
"""Parts of the output of ``proj`` by the class of diffusers.models.activations."""


def derived_plan(net: nn.Module, among: Set[nn.Module]) -> dict[str, str]:
    """Layout of each module that is cut, by path; empty where no module is attention.

    Args:
        among: the net's modules that may be cut.
    """
    if not any(True for _ in attentions(net, among)):
        return {}
    plan: dict[str, str] = {}
    for path, module in net.named_modules():
        own = _layouts(module) if module in among else {}
        plan |= {f"{path}.{name}".lstrip("."): layout for name, layout in own.items()}
    return plan


def attentions(net: nn.Module, among: Set[nn.Module]) -> Iterator[tuple[str, nn.Module]]:
    """Attention among a net's modules, by path."""
    return ((path, part) for path, part in net.named_modules() if part in among and _output_of(part) is not None)


def check_attentions(name: str, net: nn.Module, among: Set[nn.Module], ranks: int) -> None:
    """Raises InputError where heads cannot be shared out to the ranks; names the module."""
    for path, module in attentions(net, among):
        heads = heads_of(module)
        if heads % ranks:
            where = f"module {f'{name}.{path}'.rstrip('.')} on tp={ranks}"
            raise InputError(where, f"{heads} heads do not divide by it", "write another tp")


def unknown_attention(net: nn.Module, among: Set[nn.Module]) -> tuple[str, str] | None:
    """The path of a module of attention that is not as diffusers has it, and why; None: there is none."""
    for path, module in attentions(net, among):
        heads = heads_of(module)
        for child, part in module.named_children():
            if child not in (*BESIDE, *_added_layouts(module)) and not _is_of_heads(part, module, heads):
                return f"{path}.{child}".lstrip("."), "its layout is not carried"
        added = [key for key in ADDED if key in _added_layouts(module)]
        if len({module.get_submodule(key).out_features for key in (*PROJECTIONS, *added)}) > 1:
            return path, "queries, keys and values have different sizes"
    return None


def _is_of_heads(part: nn.Module, module: nn.Module, heads: int) -> bool:
    """Whether all parameters of a part of attention are of one head's size, as those of norms of single heads, or it
    has none: it may see any of the heads."""
    projection: Any = module.get_submodule(PROJECTIONS[0])
    size = (projection.out_features // max(heads, 1),)
    return all(tuple(parameter.shape) == size for parameter in part.parameters())


def share_heads(net: nn.Module, among: Set[nn.Module], ranks: int) -> None:
    """After the cut: attention counts the heads of this rank, and their width."""
    for _, module in attentions(net, among):
        for key, layer in WIDTHS.items():
            if getattr(module, key, None) == module.get_submodule(layer).out_features:
                setattr(module, key, getattr(module, key) // ranks)
        for key in COUNTS:
            if isinstance(getattr(module, key, None), int):
                setattr(module, key, getattr(module, key) // ranks)


def heads_of(module: nn.Module) -> int:
    """Heads of attention; 0 where the module has no count."""
    counts = [getattr(module, key, None) for key in COUNTS]
    return next((count for count in counts if isinstance(count, int)), 0)


def _layouts(module: nn.Module) -> dict[str, str]:
    """Layouts of modules within a module, by path from there."""
    if (output := _output_of(module)) is not None:
        return {**dict.fromkeys(PROJECTIONS, "colwise"), output: "rowwise", **_added_layouts(module)}
    if type(module).__module__.startswith("diffusers.") and type(module).__name__ == "FeedForward":
        return _diffusers_feed_forward(module)
    if isinstance(module, nn.Sequential) and type(module).forward is nn.Sequential.forward:
        return _sequential(list(module.named_children()))
    return {}


def _added_layouts(module: nn.Module) -> dict[str, str]:
    """Layouts of the layers of attention's second stream; empty where it has none."""
    children = dict(module.named_children())
    layouts = {**dict.fromkeys(ADDED, "colwise"), ADDED_OUTPUT: "rowwise"}
    return {key: layout for key, layout in layouts.items() if is_linear(children.get(key))}


def _output_of(module: nn.Module) -> str | None:
    """The path of the output's linear layer in attention; None of all other modules."""
    children = dict(module.named_children())
    if not heads_of(module) or not all(is_linear(children.get(key)) for key in PROJECTIONS):
        return None
    output = children.get("to_out")
    if is_linear(output):
        return "to_out"
    if isinstance(output, nn.ModuleList | nn.Sequential) and len(output) and is_linear(output[0]):
        return "to_out.0"
    return None


def _diffusers_feed_forward(module: nn.Module) -> dict[str, str]:
    parts = DIFFUSERS.get(type(module.get_submodule("net.0")).__name__)
    if parts is None:
        return {}
    return {"net.0.proj": "colwise" if parts == 1 else f"colwise_fused_{parts}", "net.2": "rowwise"}


def _sequential(children: list[tuple[str, nn.Module]]) -> dict[str, str]:
    if len(children) < 2 or not is_linear(children[-1][1]):
        return {}
    (first, begins), *between, (last, _) = children
    if not all(isinstance(part, (*ACTIVATIONS, nn.Dropout)) for _, part in between):
        return {}
    if is_linear(begins) and between:
        return {first: "colwise", last: "rowwise"}
    return {last: "colwise_gather_output"} if isinstance(begins, ACTIVATIONS) else {}
