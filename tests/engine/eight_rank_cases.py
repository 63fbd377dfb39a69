"""Jobs on meshes of eight ranks."""

import torch

from memfit.installation import release_number
from memfit.mesh import MeshShape
from memfit.torch_compat import context_parallel, pipelining
from tests.engine.engine_case import EngineCase

EIGHT_CASES = [
    EngineCase("llama", "fsdp2", 2, {}, {}, MeshShape(dp_replicate=2, dp_shard=2, tp=2)),
    EngineCase("llama", "fsdp2", 4, {}, {}, MeshShape(pp=2, dp_shard=2, tp=2)),
    EngineCase("llama", "fsdp2", 4, {}, {}, MeshShape(pp=2, dp_replicate=2, dp_shard=2)),
    EngineCase("llama", "fsdp2", 4, {}, {}, MeshShape(pp=2, dp_replicate=2, tp=2)),
    EngineCase("mixture", "fsdp2", 2, {}, {}, MeshShape(dp_replicate=2, tp=2, ep=2)),
    EngineCase("mixture", "fsdp2", 2, {}, {}, MeshShape(dp_replicate=2, dp_shard=2, ep=2)),
    EngineCase("even mixture", "fsdp2", 2, {}, {}, MeshShape(dp_replicate=2, dp_shard=2, dp_shard_in_ep=2)),
    EngineCase("even mixture", "fsdp2", 2, {}, {}, MeshShape(dp_shard=2, dp_shard_in_ep=2, tp=2)),
    EngineCase("mixture", "fsdp2", 2, {}, {}, MeshShape(dp_shard=2, tp=2, ep=2)),
    EngineCase("mixture", "fsdp2", 4, {}, {}, MeshShape(pp=2, dp_shard=2, ep=2)),
    EngineCase("mixture", "fsdp2", 4, {}, {}, MeshShape(pp=2, tp=2, ep=2)),
    EngineCase("mixture", "fsdp2", 4, {}, {}, MeshShape(pp=2, dp_replicate=2, ep=2)),
    EngineCase("divided llama", "fsdp2", 1, {}, {}, MeshShape(dp_replicate=2, dp_shard=2, cp=2)),
    EngineCase("divided llama", "fsdp2", 1, {}, {}, MeshShape(dp_shard=2, cp=2, tp=2)),
    EngineCase("divided stages", "fsdp2", 4, {}, {}, MeshShape(pp=2, dp_shard=2, cp=2)),
    EngineCase("divided stages", "fsdp2", 4, {}, {}, MeshShape(pp=2, dp_replicate=2, cp=2)),
    EngineCase("divided stages", "fsdp2", 4, {}, {}, MeshShape(pp=2, cp=2, tp=2)),
    EngineCase("divided mixture", "fsdp2", 2, {}, {}, MeshShape(dp_shard=2, cp=2, ep=2)),
    EngineCase("divided mixture", "fsdp2", 2, {}, {}, MeshShape(dp_replicate=2, cp=2, ep=2)),
    EngineCase("divided mixture", "fsdp2", 1, {}, {}, MeshShape(cp=2, tp=2, ep=2)),
    EngineCase("divided mixture", "fsdp2", 4, {}, {}, MeshShape(pp=2, cp=2, ep=2)),
    EngineCase("even divided mixture", "fsdp2", 2, {}, {}, MeshShape(dp_shard=2, dp_shard_in_ep=2, cp=2)),
    EngineCase("even divided mixture", "fsdp2", 2, {}, {}, MeshShape(dp_shard_in_ep=2, cp=2, tp=2)),
    EngineCase("even divided mixture", "fsdp2", 4, {}, {}, MeshShape(pp=2, dp_shard_in_ep=2, cp=2)),
    EngineCase("even mixture", "fsdp2", 4, {}, {}, MeshShape(pp=2, dp_shard=2, dp_shard_in_ep=2)),
    EngineCase("even mixture", "fsdp2", 4, {}, {}, MeshShape(pp=2, dp_shard_in_ep=2, tp=2)),
]
"""Meshes of eight ranks."""


def refused(case: EngineCase) -> str:
    """Why memfit refuses a case's mesh under the installed torch; empty where it carries it."""
    oldest = {"pp": pipelining.OLDEST, "cp": context_parallel.OLDEST}
    needed = [name for name in case.mesh.sizes() if release_number(torch.__version__) < oldest.get(name, (0,))]
    return ", ".join(f"memfit refuses {name} before torch {'.'.join(map(str, oldest[name]))}" for name in needed)
