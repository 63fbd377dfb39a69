"""Jobs on meshes of eight ranks."""

from memfit.mesh import MeshShape
from tests.engine.engine_case import EngineCase

EIGHT_CASES = [
    EngineCase("llama", "fsdp2", 2, {}, {}, MeshShape(dp_replicate=2, dp_shard=2, tp=2)),
    EngineCase("llama", "fsdp2", 4, {}, {}, MeshShape(pp=2, dp_shard=2, tp=2)),
    EngineCase("llama", "fsdp2", 4, {}, {}, MeshShape(pp=2, dp_replicate=2, dp_shard=2)),
    EngineCase("mixture", "fsdp2", 2, {}, {}, MeshShape(dp_replicate=2, dp_shard=2, ep=2)),
    EngineCase("even mixture", "fsdp2", 2, {}, {}, MeshShape(dp_replicate=2, dp_shard=2, dp_shard_in_ep=2)),
    EngineCase("even mixture", "fsdp2", 2, {}, {}, MeshShape(dp_shard=2, dp_shard_in_ep=2, tp=2)),
    EngineCase("mixture", "fsdp2", 2, {}, {}, MeshShape(dp_shard=2, tp=2, ep=2)),
    EngineCase("mixture", "fsdp2", 4, {}, {}, MeshShape(pp=2, dp_shard=2, ep=2)),
    EngineCase("mixture", "fsdp2", 4, {}, {}, MeshShape(pp=2, tp=2, ep=2)),
    EngineCase("divided llama", "fsdp2", 1, {}, {}, MeshShape(dp_replicate=2, dp_shard=2, cp=2)),
    EngineCase("divided llama", "fsdp2", 1, {}, {}, MeshShape(dp_shard=2, cp=2, tp=2)),
]
"""Meshes of eight ranks."""
