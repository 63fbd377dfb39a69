"""Layout: which modules of a job a plan may choose for, one by one: blocks, and the larger parts inside of each."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from torch import nn

from memfit.blocks import beside_blocks, checkpoint_candidates, find_module, further_candidates, repeated_blocks
from memfit.events import Trace
from memfit.job import Job, Nets

PARTS = 3
"""Parts of a block that are chosen for one by one, at most; three modes each make 27 ways to keep a block."""
LEAST = 0.08
"""Of what its block keeps, a part keeps so much at least."""
WHOLE = 0.6
"""A part that keeps so much of its block is as good as the block: its own parts are looked at."""


@dataclass(frozen=True, kw_only=True)
class RecomputableBlock:
    """A module that may be recomputed, and those inside of it that may be recomputed instead."""

    path: str
    parts: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Blocks, none inside of another. Its units are each block's parts, and then the rest of the block."""

    blocks: tuple[RecomputableBlock, ...]

    @cached_property
    def units(self) -> list[tuple[int, str]]:
        """(number of the block, path) of every unit; a block's rest has the block's own path and comes last."""
        return [(i, path) for i, block in enumerate(self.blocks) for path in (*block.parts, block.path)]

    @cached_property
    def block_of(self) -> np.ndarray:
        """int (units,)."""
        return np.array([block for block, _ in self.units], int)

    def of_modules(self, modules: Sequence[str]) -> np.ndarray:
        """The unit that each module path belongs to; -1: none."""
        number = {path: index for index, (_, path) in enumerate(self.units)}
        return np.array([number.get(_longest(path, number), -1) for path in modules], int)


def blocks_of(job: Job, nets: Nets) -> list[str]:
    """Paths of the outermost modules that may be recomputed: those that the job names, and repeated blocks.

    Where it names none, also what lies beside the blocks in modules that hold them.
    """
    rest = beside_blocks(nets) if job.checkpointable(nets) is None else []
    named = dict.fromkeys(
        [*checkpoint_candidates(job, nets), *further_candidates(job, nets), *repeated_blocks(nets), *rest]
    )
    return [path for path in named if not any(path.startswith(f"{outer}.") for outer in named)]


def with_parts(paths: Sequence[str], nets: Nets, kept: Mapping[str, int]) -> Layout:
    """The layout of these blocks; their parts are what keeps most inside of them.

    Args:
        kept: bytes that each module keeps for its backward, without those of its children, by path.
    """
    below: dict[str, int] = {}
    for path, nbytes in kept.items():
        names = path.split(".")
        for end in range(1, len(names) + 1):
            outer = ".".join(names[:end])
            below[outer] = below.get(outer, 0) + nbytes
    blocks = []
    for path in paths:
        if below.get(path, 0) > 0:
            parts = sorted(_parts(path, find_module(nets, path), below, below[path]), key=lambda part: -below[part])
            blocks.append(RecomputableBlock(path=path, parts=tuple(sorted(parts[:PARTS]))))
    return Layout(blocks=tuple(blocks))


def holds(path: str, inner: Iterable[str]) -> bool:
    """Whether one of these modules is the one at ``path``, or inside of it."""
    return any(module == path or module.startswith(f"{path}.") for module in inner)


def kept_by_module(trace: Trace) -> dict[str, int]:
    """Bytes of activations that each module's own operators made, by path."""
    from memfit.events import CATEGORIES

    made = np.flatnonzero((trace.category == CATEGORIES.index("activations")) & (trace.made_by >= 0))
    modules = trace.operator_module[trace.made_by[made]]
    sums = np.bincount(modules, weights=trace.nbytes[made], minlength=len(trace.modules))
    return {path: int(sums[index]) for index, path in enumerate(trace.modules) if sums[index]}


def _parts(path: str, module: nn.Module, below: Mapping[str, int], net_bytes: int) -> list[str]:
    parts: list[str] = []
    for name, child in module.named_children():
        inner = f"{path}.{name}"
        if below.get(inner, 0) < LEAST * net_bytes:
            continue
        deeper = _parts(inner, child, below, net_bytes)
        listed = isinstance(child, nn.ModuleList | nn.ModuleDict)
        if listed or (deeper and below[inner] >= WHOLE * net_bytes):
            parts += deeper
        elif any(True for _ in child.children()) or not type(child).__module__.startswith("torch.nn"):
            parts.append(inner)
    return parts


def _longest(path: str, known: Mapping[str, int]) -> str:
    while path and path not in known:
        path = path.rpartition(".")[0]
    return path
