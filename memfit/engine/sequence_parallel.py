"""Sequence parallelism beside tensor parallelism: between layers that are cut, a rank has its part of the sequence.

Norms, dropout and residual sums of decoder layers run on a part of the tokens; attention and feed-forward gather the
tokens, and their last layers scatter the outputs (Korthikanti et al., 2022, "Reducing Activation Recomputation in Large
Transformer Models"). torch's ``RowwiseParallel`` scatters, and DTensors gather; norms see plain tensors, and sum their
gradients over the ranks.

Left out: modules that read what a decoder layer returns otherwise than the next layer and the last norm do.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import ParallelStyle, RowwiseParallel

from memfit.errors import InputError

SEQUENCE = Shard(1)
"""The layout of (samples, tokens, width) of which a rank has some tokens."""
_CUT = frozenset({"colwise", "rowwise"})
WITHOUT = "take engine_choices.sequence_parallel out"


@dataclass(frozen=True, kw_only=True)
class SequenceLayers:
    """The modules of a net between which its tokens are divided."""

    first: nn.Module
    """The first decoder layer, which is given all tokens."""
    gathering: tuple[nn.Module, ...]
    """Attention and feed-forward of each layer."""
    norms: frozenset[nn.Module]
    """Those that see a part of the tokens."""
    last: nn.Module
    """The last of them, which gives all tokens."""


def sequence_layers(name: str, net: nn.Module, layout_of: Callable[[str], str | None], ranks: int) -> SequenceLayers:
    """What of a net of transformers is gathered, and what sees a part of the tokens.

    Args:
        layout_of: transformers' layout of a module, by its path.

    Raises:
        InputError: the net has other parts; names the module.
    """
    paths = {module: path for path, module in net.named_modules()}
    base: Any = getattr(net, "base_model", None)
    layers, last = getattr(base, "layers", None), getattr(base, "norm", None)
    if not isinstance(layers, nn.ModuleList) or not len(layers) or last is None or not _is_norm(last):
        why = f"{type(net).__name__} has no list of layers and one norm after it"
        raise InputError(f"net {name!r} on tp={ranks}", why, WITHOUT)
    gathering, norms = list[nn.Module](), [last]
    for layer in layers:
        for child in layer.children():
            inner = {layout_of(paths[module]) for module in child.modules()}
            seen = f"module {name}.{paths[child]} on tp={ranks}"
            if inner & _CUT:
                _check_block(seen, child, {layout_of(paths[module]): module for module in child.modules()})
                gathering.append(child)
            elif _is_norm(child):
                norms.append(child)
            elif any(True for _ in child.parameters()):
                why = "it is neither cut by columns and rows nor a norm, so a part of the tokens is not enough"
                raise InputError(seen, why, WITHOUT)
    return SequenceLayers(first=layers[0], gathering=tuple(gathering), norms=frozenset(norms), last=last)


def scattering_styles(
    net: nn.Module, layers: SequenceLayers, styles: Mapping[str, ParallelStyle]
) -> dict[str, ParallelStyle]:
    """Of styles by path, those of the gathering modules' last layers, which scatter their outputs."""
    inside = {id(module) for block in layers.gathering for module in block.modules()}
    return {
        path: RowwiseParallel(output_layouts=SEQUENCE)
        for path, style in styles.items()
        if isinstance(style, RowwiseParallel) and id(net.get_submodule(path)) in inside
    }


def divide_tokens(layers: SequenceLayers, mesh: DeviceMesh) -> None:
    """Sets the hooks that divide and gather tokens over a mesh of one dimension."""
    layers.first.register_forward_pre_hook(_on_tokens(lambda tokens: _divided(tokens, mesh)), with_kwargs=True)
    for module in layers.gathering:
        module.register_forward_pre_hook(_on_tokens(lambda tokens: _whole(tokens, mesh)), with_kwargs=True)
    layers.last.register_forward_hook(lambda module, args, output: _whole(output, mesh).to_local())


def _is_norm(module: Any) -> bool:
    """Whether a module is a leaf whose parameters are as wide as a token."""
    if not isinstance(module, nn.Module) or any(True for _ in module.children()):
        return False
    dimensions = [parameter.dim() for parameter in module.parameters()]
    return bool(dimensions) and set(dimensions) == {1}


def _check_block(seen: str, block: nn.Module, by_layout: dict[str | None, nn.Module]) -> None:
    """Raises InputError where a block's output is not scattered as it is summed."""
    others = by_layout.keys() - _CUT - {None, "replicated_with_grad_allreduce"}
    if others:
        raise InputError(seen, f"its layout {sorted(map(str, others))[0]!r} takes all tokens alone", WITHOUT)
    rowwise: Any = by_layout.get("rowwise")
    if rowwise is None or rowwise.bias is not None:
        why = "no layer of it that is cut by rows gives its output" if rowwise is None else "its last layer has a bias"
        raise InputError(seen, why, WITHOUT)


def _on_tokens(change: Callable[[Tensor], Any]) -> Callable[..., Any]:
    """A hook that changes what a module is given first, by position or as ``hidden_states``."""

    def hook(module: nn.Module, args: Any, kwargs: Any) -> Any:
        if args:
            return (change(args[0]), *args[1:]), kwargs
        return args, {**kwargs, "hidden_states": change(kwargs["hidden_states"])}

    return hook


def _divided(tokens: Tensor, mesh: DeviceMesh) -> Tensor:
    """This rank's tokens of all.

    Raises:
        InputError: they do not divide by the ranks.
    """
    if tokens.shape[1] % mesh.size():
        seen = f"a sequence of {tokens.shape[1]} tokens on tp={mesh.size()}"
        raise InputError(seen, "it does not divide over the ranks", f"pad sequences to a multiple, or {WITHOUT}")
    return (
        DTensor.from_local(tokens, mesh, [Replicate()], run_check=False).redistribute(placements=[SEQUENCE]).to_local()
    )


def _whole(tokens: Tensor, mesh: DeviceMesh) -> DTensor:
    """All tokens, of which this rank gives its own."""
    return DTensor.from_local(tokens, mesh, [SEQUENCE], run_check=False).redistribute(placements=[Replicate()])
