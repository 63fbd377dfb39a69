"""The --mesh and --engine-choice options of several verbs, and the ranks and engine that they give."""

from __future__ import annotations

import tomllib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import click

from memfit.errors import InputError
from memfit.mesh import MeshShape, parse_mesh

mesh_option = click.option(
    "--mesh",
    metavar="D=N,...",
    help="Ranks by dimension, such as dp_replicate=2,dp_shard=4: two replicas, each sharded over four ranks.",
)

engine_choice_option = click.option(
    "--engine-choice",
    "choices",
    multiple=True,
    metavar="NAME=VALUE",
    help="A choice of --engine's or --mesh's, as [engine_choices] of a plan file has it, such as "
    "sequence_parallel=true; may be repeated.",
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


def asked_choices(pairs: Iterable[str], engine: str | None) -> dict[str, Any]:
    """What --engine-choice says, of the engine that was asked for; None: none was.

    Raises:
        InputError: no value, a name twice, no engine, or one that has no such choice or not with this value.
    """
    pairs = tuple(pairs)
    if not pairs:
        return {}
    from memfit.engine.factory import check_choices, check_known
    from memfit.loading import read_settings

    choices = {name: _value(text) for name, text in read_settings(pairs, "--engine-choice").items()}
    if engine is None:
        why = "no engine is named that it could be of"
        raise InputError(f"--engine-choice {pairs[0]}", why, "write --engine or --mesh too")
    check_known(engine)
    check_choices(engine, choices)
    return choices


def _value(text: str) -> Any:
    """As a plan file's TOML has it; bare words are text."""
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text
