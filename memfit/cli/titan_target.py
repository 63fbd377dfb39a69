"""A configuration of torchtitan in the place of a job: ``memfit predict torchtitan:llama3_8b``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import click

from memfit.errors import InputError

if TYPE_CHECKING:
    from memfit.script.titan.asked_titan import AskedTitan

PREFIX = "torchtitan:"
_INSTEAD = {
    "--precision": "write --set training.mixed_precision_param=bfloat16",
    "--checkpoint": "write --set activation_checkpoint=none, selective or full",
    "--accumulate": "write --set training.global_batch_size=N",
    "--engine": "write --mesh or --set parallelism.KEY=N",
    "--shape": "write --micro-batch N --set training.seq_len=LENGTH",
    "--epoch": "leave it out: all rows have training.seq_len tokens",
    "--shapes": "leave it out: all rows have training.seq_len tokens",
}
"""Options that change a job, and what changes a configuration of torchtitan."""

config_option = click.option(
    "--config",
    metavar="F.toml|NAME",
    help="Of torchtitan:NAME: a TOML file of its settings; of torchtitan:MODEL: a configuration's name.",
)


def is_titan(job: str) -> bool:
    """Whether a job's name is a target of torchtitan."""
    return job.startswith(PREFIX)


def asked_titan(
    job: str, *, config: str | None, pairs: tuple[str, ...], world: int | None, mesh: str | None,
    options: Mapping[str, object],
) -> AskedTitan:  # fmt: skip
    """The configuration for several questions.

    Args:
        config: of --config.
        pairs: of --set.
        options: options that change a job, by name, with None for those that were not given.

    Raises:
        InputError: an option that changes a job, or a mesh that is none or has other ranks than ``world``.
    """
    from memfit.loading import read_settings
    from memfit.mesh import parse_mesh
    from memfit.script.titan.asked_titan import AskedTitan
    from memfit.script.titan.target import parse_target, ranks_of

    for name, value in options.items():
        if value is not None:
            raise InputError(f"{name} with {job}", "its configuration says it", _INSTEAD[name])
    shape = None if mesh is None else parse_mesh(mesh)
    if shape is not None and world is not None and world != (ranks := ranks_of(shape)):
        raise InputError(f"--world {world} --mesh {mesh}", f"the mesh has {ranks} ranks", "leave --world out")
    return AskedTitan(job, parse_target(job, config, read_settings(pairs)), world, shape)


def refuse_config(config: str | None) -> None:
    """Raises InputError where --config is given with a job that is no configuration of torchtitan."""
    if config is not None:
        write = f"write {PREFIX}NAME as the job, or --set NAME=VALUE"
        raise InputError(f"--config {config}", "it is for configurations of torchtitan", write)
