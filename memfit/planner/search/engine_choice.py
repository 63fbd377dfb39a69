"""Which engine: every one that can carry a job is planned, with its shards and what it communicates."""

from __future__ import annotations

from typing import Protocol

from memfit.device.hardware.catalogue import Device, interconnect_of
from memfit.engine.capabilities import CAPABILITIES, dimensions, engine_of
from memfit.engine.factory import check_known
from memfit.engine.sharded_units import units
from memfit.errors import InputError
from memfit.job import Nets, is_trained
from memfit.mesh import MeshShape
from memfit.planner.timing.communication import communication_seconds


class Communicates(Protocol):
    """Seconds that a window of so many micro-batches a rank waits for other ranks."""

    def __call__(self, micro_batches: int, computed: float = 0.0) -> float:
        """``computed``: seconds that these micro-batches compute, all together, which may hide a part."""


def engine_candidates(engine: str | None, devices: int, mesh: MeshShape | None = None) -> tuple[str, ...]:
    """Engines to plan for, the one to prefer first.

    Raises:
        InputError: no such engine, or none for so many devices or for this mesh.
    """
    if mesh is not None:
        return (engine_of(mesh, engine),)
    if engine is None:
        return ("single",) if devices == 1 else ("ddp", "fsdp2")
    check_known(engine)
    if CAPABILITIES[engine].several_ranks != (devices > 1):
        write = "write --engine single" if devices == 1 else "write --engine ddp or --engine fsdp2"
        raise InputError(f"--engine {engine} --devices {devices}", "they do not go together", write)
    return (engine,)


def communication_model(
    engine: str, nets: Nets, device: Device, devices: int, mesh: MeshShape | None = None
) -> Communicates:
    """Estimates communication by the card's own link to others in a host, not overlapped with computation; 0 where
    the link is not known.

    Args:
        mesh: the devices by dimension; None: all in the one that the engine is for.
        nets: whole ones, without their bytes.

    Nothing for stages of a pipeline, of whose ranks nothing is known where the link is not.
    """
    link = interconnect_of(device)
    if mesh is not None and mesh.pp > 1:
        return silent
    if link is None or not CAPABILITIES[engine].several_ranks:
        return silent
    trained = [net for net in nets.values() if is_trained(net)]
    nbytes = sum(p.nbytes for net in trained for p in net.parameters() if p.requires_grad)
    shards = CAPABILITIES[engine].shards_weights
    gathered = sum(len(units(net)) for net in trained) if shards else None
    several = dimensions(engine, mesh)
    replicas = several.dp_replicate if several is not None else 1

    def seconds(micro_batches: int, computed: float = 0.0) -> float:
        return communication_seconds(
            engine, nbytes, devices // replicas, link, micro_batches=micro_batches, units=gathered,
            sync_each_micro_batch=shards, replicas=replicas,
        )  # fmt: skip

    return seconds


def silent(micro_batches: int, computed: float = 0.0) -> float:
    """One rank tells nobody anything."""
    return 0.0
