"""MeshShape: how the ranks of a run are divided between kinds of parallelism, as --mesh and plan files write it."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields

from memfit.errors import InputError

INSIDE = ("dp_shard_in_ep", "cp", "tp", "ep")
"""Dimensions whose ranks wait for each other inside of layers."""
SHARDING = ("dp_shard", "dp_shard_in_ep", "cp")
"""Dimensions over which one replica's parameters are sharded, together; experts are whole on ``dp_shard_in_ep``."""
TOKENS = "dp_shard_in_ep"
"""The dimension whose ranks send each other tokens; where there is ``cp`` too, the ranks of both do, together."""
OF_EXPERTS = ("dp_shard_in_ep", "cp")
"""Dimensions over which experts are divided, together, where there is the first."""


def joined_name(names: Iterable[str]) -> str:
    """What the group of the ranks of several dimensions is called: ``dp_shard_in_ep_cp``."""
    return "_".join(names)


def dimensions_inside(ranks_in: Callable[[str], int]) -> str:
    """``tp=2,ep=4``: those of ``INSIDE`` with several ranks; ``ranks_in`` gives the ranks of a dimension."""
    return ",".join(f"{name}={ranks_in(name)}" for name in INSIDE if ranks_in(name) > 1)


@dataclass(frozen=True, kw_only=True)
class MeshShape:
    """Ranks by dimension, from the outermost to the innermost: neighbours in rank differ in the last dimension first.

    The names and their order are torchtitan's (``torchtitan.distributed.ParallelDims``).
    """

    pp: int = 1
    """Stages of a pipeline."""
    dp_replicate: int = 1
    """Replicas, each of which takes its own samples."""
    dp_shard: int = 1
    """Ranks that hold parts of one replica (FSDP), each of which takes its own samples."""
    dp_shard_in_ep: int = 1
    """Ranks that hold some of the experts, and parts of all else as those of ``dp_shard``; each takes its own samples,
    and sends tokens to the ranks of their experts. With the ranks of ``cp`` torchtitan's ``expert_parallel_degree``,
    and a name of its meshes.
    """
    cp: int = 1
    """Ranks that hold parts of each sequence, and of the parameters as those of ``dp_shard`` do."""
    tp: int = 1
    """Ranks that hold parts of each layer and see the same samples."""
    ep: int = 1
    """Ranks that hold some of the experts and see the same samples."""

    @property
    def world(self) -> int:
        """All ranks."""
        return self.pp * self.data_ranks * self.same_samples

    @property
    def data_ranks(self) -> int:
        """Ranks, or groups of them, that take samples of their own: the shares of a window."""
        return self.dp_replicate * self.dp_shard * self.dp_shard_in_ep

    @property
    def shards(self) -> int:
        """Ranks over which one replica's parameters are sharded."""
        return self.dp_shard * self.dp_shard_in_ep * self.cp

    @property
    def sending(self) -> int:
        """Ranks that send each other tokens, over which experts are divided; 1: none do."""
        return self.dp_shard_in_ep * self.cp if self.dp_shard_in_ep > 1 else 1

    @property
    def expert_dimensions(self) -> tuple[str, ...]:
        """The dimensions of those that send each other tokens, with several ranks."""
        return tuple(name for name in OF_EXPERTS if name in self.sizes()) if self.sending > 1 else ()

    @property
    def same_samples(self) -> int:
        """Neighbouring ranks that share their samples."""
        return self.cp * self.tp * self.ep

    def sizes(self) -> dict[str, int]:
        """The dimensions of more than one rank, the outermost first."""
        sizes = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: size for name, size in sizes.items() if size > 1}

    def place(self, rank: int) -> dict[str, int]:
        """Where a rank is in every dimension of more than one rank."""
        place: dict[str, int] = {}
        for name, size in reversed(self.sizes().items()):
            rank, place[name] = divmod(rank, size)
        return dict(reversed(place.items()))

    def __str__(self) -> str:
        return ",".join(f"{name}={size}" for name, size in self.sizes().items()) or "dp_replicate=1"


_NAMES = tuple(field.name for field in fields(MeshShape))


def parse_mesh(text: str) -> MeshShape:
    """``dp_replicate=2,dp_shard=4``: the value of --mesh.

    Raises:
        InputError: it is no list of dimensions and sizes, or ``mesh_of`` refuses it.
    """
    sizes: dict[str, int] = {}
    for part in text.split(","):
        name, equals, size = (word.strip() for word in part.partition("="))
        if not equals or not size.isdecimal():
            write = "write --mesh dp_replicate=2,dp_shard=4"
            raise InputError(f"--mesh {text}", f"{part.strip()!r} is not a dimension and its ranks", write)
        if name in sizes:
            raise InputError(f"--mesh {text}", f"{name} is given twice", "write each dimension once")
        sizes[name] = int(size)
    return mesh_of(sizes, f"--mesh {text}")


def mesh_of(sizes: Mapping[str, object], where: str) -> MeshShape:
    """The mesh of these dimensions.

    Args:
        where: what was read, for messages.

    Raises:
        InputError: a dimension that is not known, or a size that is not a number of ranks.
    """
    for name, size in sizes.items():
        if name not in _NAMES:
            near = difflib.get_close_matches(name, _NAMES, n=1, cutoff=0.4)
            write = f"write {near[0]}={size}" if near else f"write some of {', '.join(_NAMES)}"
            raise InputError(where, f"there is no dimension {name!r}", write)
        if type(size) is not int or size < 1:
            raise InputError(where, f"{name} = {size!r} is not a number of ranks", f"write {name}=1 or more")
    return MeshShape(**{name: size for name, size in sizes.items() if type(size) is int})


def communicators(world: int, mesh: Mapping[str, int]) -> int:
    """NCCL communicators of a rank: one of all ranks, where a mesh has several dimensions one of each, one of all
    ranks that share a replica's parameters where they are of several, of those of them that divide experts the same,
    and of a pipeline's stage one with each of its
    neighbours, through which it sends and receives alone (ProcessGroupNCCL)."""
    if world == 1:
        return 0
    of_shards = 1 if len(mesh.keys() & set(SHARDING)) > 1 else 0
    of_shards += mesh.keys() >= set(SHARDING)
    return 1 + of_shards + (len(mesh) if len(mesh) > 1 else 0) + min(mesh.get("pp", 1) - 1, 2)
