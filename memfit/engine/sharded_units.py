"""The modules of a net that ``fully_shard`` gathers one by one, and what it cannot shard."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from torch import Tensor, nn

from memfit.blocks import items
from memfit.engine.ddp import BUCKET_BYTES
from memfit.engine.refusals import check_contiguous
from memfit.errors import InputError
from memfit.torch_compat.attributes import own_parameters

LEAST = BUCKET_BYTES
"""Bytes that are worth a gather of their own: DDP's bucket."""


def is_number(parameter: Tensor) -> bool:
    """Whether a parameter is a single number without a dimension, which ``fully_shard`` refuses: there is nothing to
    cut it by."""
    return parameter.dim() == 0


def units(net: nn.Module) -> list[str]:
    """Paths of the modules that are gathered one by one, the net itself last.

    These are items of its lists (blocks) that hold LEAST bytes or a hundredth of the net, and share no parameter with
    the rest. Of an item within an item, the inner ones, unless the outer one holds more beside them.
    """
    holders = Counter(map(id, _held(net)))
    least = max(1, min(LEAST, sum(p.nbytes for p in net.parameters()) // 100))
    chosen: dict[str, int] = {}
    for path, module in reversed(list(items(net))):
        inside = _held(module)
        alone = all(holders[key] == count for key, count in Counter(map(id, inside)).items())
        nbytes = sum({id(p): p.nbytes for p in inside}.values())
        inner = [other for other in chosen if other.startswith(f"{path}.")]
        if alone and nbytes >= least and nbytes > 2 * sum(chosen[other] for other in inner):
            chosen = {other: size for other, size in chosen.items() if other not in inner} | {path: nbytes}
    return [*chosen, ""]


def _held(module: nn.Module) -> list[nn.Parameter]:
    """Parameters, once for each module that holds them."""
    return [p for part in module.modules() for p in own_parameters(part).values() if p is not None]


def check_units(net: nn.Module, names: Mapping[str, str]) -> None:
    """Raises InputError where a net has a parameter that cannot be sharded, or a unit parameters of several types.

    Args:
        names: what parts of the net are called in messages, by their path; "": the net itself.
    """
    for path, parameter in net.named_parameters():
        if not parameter.numel():
            raise InputError(
                f"parameter {_shown(path, names)} on --engine fsdp2",
                f"its shape {tuple(parameter.shape)} has no elements, and torch scatters no gradient of none",
                "take it out of the net, or write --engine ddp",
            )
        check_contiguous(_shown(path, names), parameter, "fsdp2")
    for path in units(net):
        sharded = (p for p in net.get_submodule(path).parameters() if not is_number(p))
        kinds = {str(p.dtype) for p in sharded if p.requires_grad}
        if len(kinds) > 1:
            raise InputError(
                f"module {_shown(path, names)} on --engine fsdp2",
                f"its trained parameters are of several types: {', '.join(sorted(kinds))}",
                "train parameters of one type, or write --engine ddp",
            )


def _shown(path: str, names: Mapping[str, str]) -> str:
    for part, name in names.items():
        if path == part or path.startswith(f"{part}.") or not part:
            return f"{name}.{path.removeprefix(part).removeprefix('.')}".rstrip(".")
    return " to ".join([*names.values()][:: max(len(names) - 1, 1)])
