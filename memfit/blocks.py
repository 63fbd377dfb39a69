"""Which modules of a net are worth recomputing one by one: its repeated blocks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from torch import nn

from memfit.errors import InputError
from memfit.job import Job, Nets


def candidates(job: Job, nets: Nets) -> list[str]:
    """Paths (``net.block.0``) of the modules that a plan may recompute: the job's own, or the repeated blocks.

    Raises:
        InputError: the job names a module that is not there.
    """
    own = job.checkpointable(nets)
    if own is None:
        return repeated_blocks(nets)
    for path in own:
        find_module(nets, path)
    return list(own)


def repeated_blocks(nets: Nets) -> list[str]:
    """Paths of the blocks that a net is a repetition of, in order.

    A block is an item of a ModuleList or Sequential that holds modules with parameters, and of whose class there are
    several. Where a block holds blocks of a class that is more numerous (a U-Net's stage its resnets), those are meant.
    """
    found = []
    for name, net in nets.items():
        counts = Counter(type(module) for _, module in items(net))
        found += [
            f"{name}.{path}"
            for path, module in items(net)
            if _chosen(module, counts) and not _inside(path, module, net, counts)
        ]
    return found


def find_module(nets: Nets, path: str) -> nn.Module:
    """The module at ``net.path``.

    Raises:
        InputError: there is none.
    """
    name, _, rest = path.partition(".")
    try:
        return nets[name].get_submodule(rest)
    except (KeyError, AttributeError):
        raise InputError(
            f"module {path!r}", "the job's nets have no such module", f"write net.path, with a net of {', '.join(nets)}"
        ) from None


def items(net: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """(path, module) of the items of the net's lists that hold several modules with parameters, outer ones first."""
    for path, module in net.named_modules():
        if isinstance(module, nn.ModuleList | nn.Sequential):
            for key, child in module.named_children():
                if (
                    not isinstance(child, nn.ModuleList)
                    and sum(1 for part in child.children() if any(True for _ in part.parameters())) > 1
                ):
                    yield f"{path}.{key}".lstrip("."), child


def _chosen(module: nn.Module, counts: Counter[type]) -> bool:
    own = counts[type(module)]
    return own > 1 and not any(counts[type(part)] > own for part in list(module.modules())[1:])


def _inside(path: str, module: nn.Module, net: nn.Module, counts: Counter[type]) -> bool:
    """Whether an outer block was chosen already."""
    parts = path.split(".")
    return any(
        _chosen(net.get_submodule(".".join(parts[:end])), counts)
        and any(p == ".".join(parts[:end]) for p, _ in items(net))
        for end in range(1, len(parts))
    )
