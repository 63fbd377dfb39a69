"""The --mesh option of several verbs, and the ranks and engine that it gives."""

from __future__ import annotations

from dataclasses import dataclass

import click

from memfit.errors import InputError
from memfit.mesh import MeshShape, parse_mesh

mesh_option = click.option(
    "--mesh",
    metavar="D=N,...",
    help="Ranks by dimension, such as dp_replicate=2,dp_shard=4: two replicas, each sharded over four ranks.",
)


@dataclass(frozen=True, kw_only=True)
class AskedRanks:
    """How many ranks there are, on which engine."""

    engine: str
    world: int
    mesh: MeshShape | None


def asked_ranks(engine: str | None, world: int | None, text: str | None) -> AskedRanks:
    """What --engine, --world and --mesh say together.

    Raises:
        InputError: the mesh is not one, has other ranks than --world, or the engine does not carry it.
    """
    if text is None:
        return AskedRanks(engine=engine or "single", world=world or 1, mesh=None)
    from memfit.engine.capabilities import engine_of

    mesh = parse_mesh(text)
    if world is not None and world != mesh.world:
        raise InputError(f"--world {world} --mesh {mesh}", f"the mesh has {mesh.world} ranks", "leave --world out")
    return AskedRanks(engine=engine_of(mesh, engine), world=mesh.world, mesh=mesh)
