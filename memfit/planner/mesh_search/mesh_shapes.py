"""The meshes that a number of devices can form, by the dimensions that engines carry."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields

from memfit.engine.capabilities import CAPABILITIES, engine_of
from memfit.errors import InputError
from memfit.mesh import TOKENS, MeshShape
from memfit.planner.mesh_nets import without_data_ranks

CARRIED = {name for does in CAPABILITIES.values() for name in does.mesh_dimensions}
"""Dimensions that some engine carries."""


@dataclass(frozen=True, kw_only=True)
class MeshFamily:
    """Meshes that cut nets alike on the same engine: they compute the same, and differ in what they shard."""

    cut: MeshShape
    """The dimensions over which nets are cut."""
    engine: str
    meshes: tuple[MeshShape, ...]
    """Those that shard over most ranks first."""

    @property
    def data_ranks(self) -> int:
        """Ranks that take samples of their own."""
        return self.meshes[0].data_ranks


def mesh_families(
    devices: int, engine: str | None = None, *, experts: bool = False, sequences: bool = False
) -> list[MeshFamily]:
    """Every mesh of so many devices that an engine carries; those that cut nets least come first.

    Args:
        engine: the one that was asked for; None: the first that carries the mesh.
        experts: whether the nets have experts, which ``ep`` divides. Meshes whose ranks send each other tokens
            (``dp_shard_in_ep``) are not among them: their times and memory follow from the router.
        sequences: whether the job says which tensors have a sequence, which ``cp`` divides.
    """
    without = {name for name, has in (("ep", experts), ("cp", sequences)) if not has} | {TOKENS}
    names = [field.name for field in fields(MeshShape) if field.name in CARRIED - without]
    by_cut: dict[tuple[MeshShape, str], list[MeshShape]] = {}
    for sizes in _factors(devices, names):
        mesh = MeshShape(**sizes)
        try:
            carries = engine_of(mesh, engine)
        except InputError:
            continue
        by_cut.setdefault((without_data_ranks(mesh), carries), []).append(mesh)
    families = [
        MeshFamily(cut=cut, engine=name, meshes=tuple(sorted(meshes, key=lambda mesh: -mesh.dp_shard)))
        for (cut, name), meshes in by_cut.items()
    ]
    return sorted(families, key=lambda family: (family.cut.world, family.engine != "fsdp2", str(family.cut)))


def _factors(count: int, names: Sequence[str]) -> Iterator[Mapping[str, int]]:
    """Every way to write ``count`` as a product with a factor for each name."""
    if not names:
        if count == 1:
            yield {}
        return
    for size in range(1, count + 1):
        if count % size == 0:
            for rest in _factors(count // size, names[1:]):
                yield {names[0]: size, **rest}
