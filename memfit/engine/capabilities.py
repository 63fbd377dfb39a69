"""What each engine does, by its name: for code that plans or prices a run before an engine is made."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from memfit.errors import InputError
from memfit.mesh import MeshShape


@dataclass(frozen=True, kw_only=True)
class Capabilities:
    """What an engine does with a job's state and its collectives."""

    several_ranks: bool = True
    """Whether it runs on more than one rank."""
    shards_optimizer: bool = False
    """Whether a rank holds, and steps, only a part of the optimizers' state."""
    shards_gradients: bool = False
    """Whether a rank keeps only a part of the gradients."""
    shards_weights: bool = False
    """Whether a rank keeps only a part of the weights, and gathers them where they are used."""
    takes_meta_nets: bool = False
    """Whether it places nets without values, of which each rank then fills its parts."""
    mesh_dimensions: tuple[str, ...] = ()
    """Dimensions of ``memfit.mesh.MeshShape`` that it carries; the first is what its ranks are without a mesh."""
    takes_cpu_offload: bool = False
    """Whether its choice ``cpu_offload`` leaves a rank's parts, and their steps, on the host."""
    zero_stage: int | None = None
    """DeepSpeed's stage; None: it is not DeepSpeed."""
    own_linear: bool = False
    """Whether it puts a linear function of its own in the place of torch's, which rounds otherwise."""

    @property
    def is_deepspeed(self) -> bool:
        """Whether DeepSpeed carries it."""
        return self.zero_stage is not None

    @property
    def reduces_each_micro_batch(self) -> bool:
        """Whether gradients are always reduced after every micro-batch, and cannot wait for the window's end."""
        return self.is_deepspeed and self.shards_gradients

    @property
    def whole_state(self) -> bool:
        """Whether every rank holds weights, gradients and optimizers' state whole, as on one device."""
        return not self.shards_optimizer


CAPABILITIES: Mapping[str, Capabilities] = {
    "single": Capabilities(several_ranks=False),
    "ddp": Capabilities(mesh_dimensions=("dp_replicate",)),
    "fsdp2": Capabilities(
        shards_optimizer=True,
        shards_gradients=True,
        shards_weights=True,
        takes_meta_nets=True,
        takes_cpu_offload=True,
        mesh_dimensions=("dp_shard", "dp_replicate", "dp_shard_in_ep", "cp", "tp", "ep", "pp"),
    ),
    "zero1": Capabilities(shards_optimizer=True, zero_stage=1),
    "zero2": Capabilities(shards_optimizer=True, shards_gradients=True, zero_stage=2),
    "zero3": Capabilities(
        shards_optimizer=True, shards_gradients=True, shards_weights=True, zero_stage=3, own_linear=True
    ),
}
"""What each engine does, for every name in ``memfit.plan.ENGINES``."""

WHOLE_STATE = tuple(name for name, engine in CAPABILITIES.items() if engine.whole_state)
"""Engines whose ranks each hold the whole state."""


def engine_of(mesh: MeshShape, engine: str | None = None) -> str:
    """The engine that carries a mesh.

    Args:
        engine: the one that was asked for; None: the first that does.

    Raises:
        InputError: the engine that was asked for does not carry it.
    """
    needed = set(mesh.sizes())
    if needed >= {"dp_shard_in_ep", "ep"}:
        why = (
            "ranks that send each other tokens are not carried together with ep, "
            "since transformers gives a module of experts one way to carry tokens"
        )
        raise InputError(f"--mesh {mesh}", why, "write dp_shard_in_ep with other dimensions, or leave it out")
    if needed >= {"dp_replicate", "dp_shard_in_ep"} and "dp_shard" not in needed:
        why = "replicas of experts that tokens are sent to are carried only where they are sharded too"
        raise InputError(f"--mesh {mesh}", why, f"write dp_shard={mesh.dp_replicate} instead of dp_replicate")
    able = [name for name, does in CAPABILITIES.items() if needed <= set(does.mesh_dimensions)]
    if engine is None:
        return able[0]
    first = CAPABILITIES[engine].mesh_dimensions[:1]
    if engine not in able or (first == ("dp_shard",) and needed == {"dp_replicate"}):
        lacks = ", ".join(needed - set(CAPABILITIES[engine].mesh_dimensions)) or "dp_replicate alone"
        raise InputError(f"--engine {engine} --mesh {mesh}", f"it does not carry {lacks}", f"write --engine {able[0]}")
    return engine


def dimensions(engine: str, mesh: MeshShape | None) -> MeshShape | None:
    """The mesh where it says more than the number of ranks does; else None.

    Raises:
        InputError: the engine does not carry it.
    """
    if mesh is None or tuple(mesh.sizes()) == CAPABILITIES[engine_of(mesh, engine)].mesh_dimensions[:1]:
        return None
    return mesh if mesh.world > 1 else None
