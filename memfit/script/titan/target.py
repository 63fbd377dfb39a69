"""``torchtitan:llama3_8b`` with its changes: what a person wrote, without importing torchtitan."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from memfit import toml
from memfit.errors import InputError, why_unreadable
from memfit.mesh import MeshShape
from memfit.replay.allocator_config import AllocatorConfig

PREFIX = "torchtitan:"
STAND_INS = ("triton", "torchvision")
"""Packages that torchtitan imports and a stand-in takes the place of where they are not installed: no kernel of Triton
runs, and torchvision decodes and resizes images that a trace does not have."""
DEGREES = {
    "pp": "pipeline_parallel_degree", "dp_replicate": "data_parallel_replicate_degree",
    "dp_shard": "data_parallel_shard_degree", "cp": "context_parallel_degree", "tp": "tensor_parallel_degree",
    "ep": "expert_parallel_degree",
}  # fmt: skip
"""torchtitan's names, in the section ``parallelism``, of the dimensions of a mesh."""


@dataclass(frozen=True, kw_only=True)
class TitanTarget:
    """A configuration of torchtitan.

    Attributes:
        module: the model, such as ``llama3``, or a package of one's own; empty: the model that has the configuration.
        config: the configuration, such as ``llama3_8b``; empty: none was named.
        changes: ``training.local_batch_size`` and such to their values, in the order in which they are made; a text is
            read as the setting's type.
    """

    module: str
    config: str
    changes: Mapping[str, Any]

    def changed(self, changes: Mapping[str, Any]) -> TitanTarget:
        """The target with more changes."""
        return TitanTarget(module=self.module, config=self.config, changes={**self.changes, **changes})

    def to_json(self) -> str:
        """As one argument of a command."""
        return json.dumps(asdict(self))


VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
"""Variables of a launch that --set takes beside settings; before torch 2.9 the allocator's is the second."""


def without_variables(target: TitanTarget) -> tuple[TitanTarget, dict[str, Any]]:
    """The target's settings, and the variables among them."""
    variables = {name: value for name, value in target.changes.items() if name in VARIABLES}
    changes = {name: value for name, value in target.changes.items() if name not in VARIABLES}
    return replace(target, changes=changes), variables


def allocator_of(variables: Mapping[str, Any]) -> str:
    """How the card's allocator makes its segments, as ``TracedQuestion.allocator`` has it.

    Raises:
        InputError: a setting of the allocator beside expandable_segments, or none that PyTorch knows.
    """
    for name, value in variables.items():
        config = AllocatorConfig.parse(value)
        if replace(config, expandable_segments=False) != AllocatorConfig():
            write = f"write {name}=expandable_segments:True or False"
            raise InputError(f"{name}={value}", "only expandable_segments is replayed here", write)
        return "expandable_segments" if config.expandable_segments else "default"
    return "default"


def titan_mesh(mesh: MeshShape) -> MeshShape:
    """A mesh of memfit as torchtitan writes it: its ``ep`` are ranks of ``dp_shard`` and ``cp``."""
    return replace(mesh, dp_shard=mesh.dp_shard * mesh.dp_shard_in_ep, dp_shard_in_ep=1, ep=mesh.ep * mesh.sending)


def ranks_of(mesh: MeshShape) -> int:
    """All ranks of torchtitan's mesh, whose ranks of ``ep`` are ranks of its other dimensions."""
    return replace(mesh, ep=1).world


def target_from_json(text: str) -> TitanTarget:
    """Reads what ``TitanTarget.to_json`` wrote."""
    return TitanTarget(**json.loads(text))


def parse_target(job: str, config: str | None, settings: Mapping[str, str]) -> TitanTarget:
    """The target that a job's name, --config and --set give.

    Args:
        job: ``torchtitan:CONFIG``, ``torchtitan:MODEL/CONFIG``, or ``torchtitan:MODEL`` where ``config`` names one.
        config: a TOML file of settings, or the name of a configuration.
        settings: of --set, which come last.

    Raises:
        InputError: a file that cannot be read or is no TOML.
    """
    module, slash, name = job.removeprefix(PREFIX).rpartition("/")
    changes: dict[str, Any] = {}
    if config is not None and config.endswith(".toml"):
        changes = read_changes(config)
    elif config is not None:
        if slash:
            seen = f"{job} --config {config}"
            raise InputError(seen, "both name a configuration", f"write {PREFIX}{module} --config {config}")
        module, name = name, config
    return TitanTarget(module=module, config=name, changes={**changes, **settings})


def read_changes(path: str) -> dict[str, Any]:
    """The settings of a TOML file, by their dotted names.

    Raises:
        InputError: it cannot be read, or is no TOML.
    """
    write = "write a TOML file of sections such as [training], or the name of a configuration"
    try:
        values = toml.loads(Path(path).read_text("utf-8"))
    except OSError as error:
        raise InputError(f"--config {path}", f"it cannot be read: {why_unreadable(error)}", write) from error
    except (toml.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InputError(f"--config {path}", f"it is no TOML: {error}", write) from error
    return _flat(values, ())


def _flat(values: Mapping[str, Any], path: Sequence[str]) -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, dict):
            flat |= _flat(value, (*path, name))
        else:
            flat[".".join((*path, name))] = value
    return flat
