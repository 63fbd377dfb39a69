"""The engine of a name, on the process group at hand."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist

from memfit.engine import deepspeed
from memfit.engine.capabilities import CAPABILITIES, dimensions
from memfit.engine.ddp import Ddp
from memfit.engine.fsdp2 import Fsdp2
from memfit.engine.pipeline import Pipeline
from memfit.engine.pipeline_cut import STAGES_OF_RANK
from memfit.engine.process_group import data_mesh, mesh_of_ranks
from memfit.engine.protocol import Engine
from memfit.engine.single import Single
from memfit.engine.stage_bounds import FIRST_MODULES
from memfit.engine.zero_local_nets import ZeroWithLocalNets
from memfit.errors import InputError
from memfit.mesh import MeshShape

_LAID_OUT = {"reduce_bucket_size": 1, "allgather_bucket_size": 2, "overlap_comm": bool, "offload_optimizer": bool}
CHOICES: Mapping[str, Mapping[str, Any]] = {
    "single": {},
    "ddp": {},
    "fsdp2": {
        "sync_each_micro_batch": bool, "half_gather": bool, "sequence_parallel": bool,
        "cpu_offload": bool, "schedule": tuple(STAGES_OF_RANK), FIRST_MODULES: list,
    },
    "zero1": _LAID_OUT,
    "zero2": _LAID_OUT,
    "zero3": {
        "reduce_bucket_size": 1, "overlap_comm": bool, "offload_optimizer": bool, "offload_param": bool,
        "prefetch_bucket_size": 0, "param_persistence_threshold": 0, "max_live_parameters": 0,
    },
}  # fmt: skip
"""What each engine lets one choose: true or false, one of some words, a list of modules, or a whole number of elements,
of which this is the least."""


def make_engine(name: str, device: torch.device, mesh: MeshShape | None = None, **how: Any) -> Engine:
    """The engine that --engine names, over every rank of the default process group (real or fake).

    Args:
        mesh: the ranks by dimension; None: all of them in the one that the engine is for.
        how: the engine's own choices, see ``CHOICES``.

    Raises:
        InputError: no such engine, a choice or a mesh that it does not have, or several ranks without a process group.
    """
    check_known(name)
    check_choices(name, how)
    if name == "single":
        return Single()
    if not dist.is_initialized():
        raise InputError(f"--engine {name}", "no process group was joined", "start it with torchrun, or memfit run")
    several = dimensions(name, mesh)
    ranks = data_mesh(device.type) if several is None else mesh_of_ranks(device.type, several)
    place: dict[str, Any] = {"rank": dist.get_rank(), "world": dist.get_world_size(), "mesh": ranks}
    if name == "ddp":
        return Ddp(**place)
    if name == "fsdp2":
        return _fsdp2(several, place, how, device)
    deepspeed.ready(device)
    return ZeroWithLocalNets(**place, stage=int(name.removeprefix("zero")), choices=deepspeed.Choices(**how))


def _fsdp2(mesh: MeshShape | None, place: Mapping[str, Any], how: Mapping[str, Any], device: torch.device) -> Engine:
    """FSDP2, or stages of a pipeline.

    Raises:
        InputError: a choice of the one that is the other's.
    """
    stages = mesh is not None and mesh.pp > 1
    sharded = mesh is None or mesh.shards > 1
    for key, value in how.items():
        if key in ("schedule", FIRST_MODULES) and not stages:
            why = "it is of a pipeline (pp)"
        elif key == "sequence_parallel" and (mesh is None or mesh.tp == 1):
            why = "it is of layers that are cut (tp)"
        elif key == "sequence_parallel" and value and stages:
            why = "stages of a pipeline (pp) pass on all tokens"
        elif key in ("half_gather", "cpu_offload") and not sharded:
            why = "it is of sharded nets (dp_shard)"
        elif key == "cpu_offload" and value and mesh is not None and mesh.dp_shard_in_ep > 1:
            why = "experts whose ranks send each other tokens (dp_shard_in_ep) are on the device"
        elif key == "sync_each_micro_batch" and stages:
            why = "a pipeline's schedule scatters gradients once, after its last backward"
        else:
            continue
        raise InputError(f"engine_choices.{key} on the mesh {mesh}", why, "take the key out")
    if not stages:
        return Fsdp2(**place, **how)
    return Pipeline(**place, **{**how, FIRST_MODULES: tuple(how.get(FIRST_MODULES, ()))}, device=device)


def syncs_in_backward(name: str, choices: Mapping[str, Any]) -> bool:
    """What ``Engine.syncs_in_backward`` of an engine with these choices is, before there is a process group."""
    engine = CAPABILITIES[name]
    overlaps = engine.is_deepspeed and deepspeed.Choices(**choices).overlap_comm
    return engine.shards_gradients or overlaps


def load_engine(name: str) -> None:
    """Imports the library that an engine needs, before anything is traced.

    Raises:
        InputError: it is not installed.
    """
    if CAPABILITIES[name].is_deepspeed:
        deepspeed.load()


def traced_engine(name: str, device: torch.device) -> AbstractContextManager[None]:
    """Inside, the library that an engine needs runs on fake tensors and a fake process group."""
    return deepspeed.traced(device) if CAPABILITIES[name].is_deepspeed else nullcontext()


def check_choices(engine: str, choices: Mapping[str, Any]) -> None:
    """Raises InputError where an engine does not have a choice, or not with this value."""
    known = CHOICES[engine]
    for key, value in choices.items():
        if key not in known:
            near = difflib.get_close_matches(key, known, n=1)
            write = f"write {near[0]}" if near else "take the key out"
            raise InputError(f"engine_choices.{key}", f"engine {engine} has no such choice", write)
        wants = known[key]
        if isinstance(wants, tuple):
            if value not in wants:
                why = "no such schedule"
                if str(value).startswith(("zbv", "dualpipe")):
                    why = "it has the last stage on the first rank, and memfit takes the losses from the last"
                raise InputError(f"engine_choices.{key} = {value!r}", why, f"write {' or '.join(wants)}")
        elif wants is list:
            if not isinstance(value, list | tuple) or not all(isinstance(name, str) for name in value):
                raise InputError(f"engine_choices.{key} = {value!r}", "no list of modules", "write their names in []")
        elif wants is bool:
            if not isinstance(value, bool):
                raise InputError(f"engine_choices.{key} = {value!r}", "neither true nor false", "write one of them")
        elif type(value) is not int or value < wants or (key == "allgather_bucket_size" and value % 2):
            even = "even, " if key == "allgather_bucket_size" else ""
            write = f"write a whole number, {even}{wants} or more, of elements"
            raise InputError(f"engine_choices.{key} = {value!r}", "no such number of elements", write)


def check_known(name: str) -> None:
    """Raises InputError where there is no such engine."""
    if name not in CHOICES:
        known = ", ".join(CHOICES)
        raise InputError(f"--engine {name}", "this memfit has no such engine yet", f"write one of {known}")
