"""Which modules of a net are worth recomputing one by one: its repeated blocks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from torch import nn

from memfit.errors import InputError
from memfit.job import Job, Nets


def checkpoint_candidates(job: Job, nets: Nets) -> list[str]:
    """Paths (``net.block.0``) of the modules that a plan may recompute: the job's own, or the repeated blocks.

    Raises:
        InputError: the job names a module that is not there.
    """
    own = job.checkpointable(nets)
    return repeated_blocks(nets) if own is None else checked_paths(job, nets, "checkpointable", own)


def further_candidates(job: Job, nets: Nets) -> list[str]:
    """Paths of the modules that the job names beside the candidates.

    Raises:
        InputError: the job names a module that is not there.
    """
    return checked_paths(job, nets, "also_checkpointable", job.also_checkpointable(nets))


def checked_paths(job: Job, nets: Nets, method: str, paths: Any) -> list[str]:
    """What a job's method gave, as paths of modules.

    Raises:
        InputError: it is no list of paths, or names a module that is not there.
    """
    listed: list[Any] = list(paths) if isinstance(paths, Iterable) and not isinstance(paths, str) else [paths, None]
    if not all(isinstance(path, str) for path in listed):
        write = f"write {method}(self, nets) -> ['net.block.0', ...]"
        raise InputError(f"{type(job).__name__}.{method}()", f"gave {type(paths).__name__}, not a list of paths", write)
    for path in listed:
        find_module(nets, path)
    return listed


def repeated_blocks(nets: Nets) -> list[str]:
    """Paths of the blocks that a net is a repetition of, in order.

    A block is an item of a ModuleList or Sequential that holds modules with parameters, and of whose class there are
    several. Where most of a block are blocks of classes that are more numerous (a U-Net's stage its resnets and
    attentions), those are meant; a small part that is as numerous (a gate, an adapter beside a weight) is none.
    """
    return [f"{name}.{path}" for name, net in nets.items() for path in _blocks(net)]


def beside_blocks(nets: Nets) -> list[str]:
    """Paths of what else lies in modules that are repeated and hold blocks: attention beside experts, say."""
    return [
        f"{name}.{path}.{inner}"
        for name, net in nets.items()
        for chosen in [_blocks(net)]
        for path, module in items(net)
        if any(block.startswith(f"{path}.") for block in chosen)
        for inner in _rest(module, {block.removeprefix(f"{path}.") for block in chosen})
    ]


def _blocks(net: nn.Module) -> list[str]:
    listed = list(items(net))
    counts = Counter(type(module) for _, module in listed)
    number = {id(module): counts[type(module)] for _, module in listed}
    chosen = [path for path, module in listed if _chosen(module, number)]
    outer = tuple(f"{path}." for path in chosen)
    return [path for path in chosen if not path.startswith(outer)]


def _rest(module: nn.Module, blocks: set[str]) -> Iterator[str]:
    """Paths of the outermost modules inside that hold several modules with parameters and none of the blocks."""
    for name, child in module.named_children():
        inner = {path.removeprefix(f"{name}.") for path in blocks if path.startswith(f"{name}.")}
        if name in blocks:
            continue
        if inner:
            yield from (f"{name}.{path}" for path in _rest(child, inner))
        elif _several(child) and not isinstance(child, nn.ModuleList | nn.ModuleDict):
            yield name


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
    """(path, module) of the items of the net's lists that hold several modules with parameters, outer ones first. A
    ModuleDict has no forward of its own: what it holds is called one by one."""
    for path, module in net.named_modules():
        if isinstance(module, nn.ModuleList | nn.Sequential):
            for key, child in module.named_children():
                if has_forward(child) and _several(child):
                    yield f"{path}.{key}".lstrip("."), child


def has_forward(module: nn.Module) -> bool:
    """Whether a module can be called: lists and dicts of modules cannot."""
    return not isinstance(module, nn.ModuleList | nn.ModuleDict)


def _several(module: nn.Module) -> bool:
    """Whether it and what it holds are several modules with parameters of their own; a parametrized one counts once."""
    own = [
        path.partition("parametrizations")[0].rstrip(".")
        for path, part in module.named_modules()
        if any(True for _ in part.parameters(recurse=False))
    ]
    return len(set(own)) > 1


def _chosen(module: nn.Module, number: Mapping[int, int]) -> bool:
    """Whether it is one of several of its class, and not mostly blocks that are more numerous (``number``, by id)."""
    own = number[id(module)]
    return own > 1 and 2 * _of_smaller(module, own, number) < _numel(module)


def _of_smaller(module: nn.Module, own: int, number: Mapping[int, int]) -> int:
    """Parameters of the outermost blocks inside that are more numerous."""
    parts = module.children()
    return sum(_numel(part) if number.get(id(part), 0) > own else _of_smaller(part, own, number) for part in parts)


def _numel(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())
