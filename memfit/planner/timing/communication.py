"""An estimate of the time that ranks spend telling each other: rings of NCCL, after what one rank sends in a window.

A ring's all-gather or reduce-scatter of S bytes over n ranks takes n - 1 steps, in each of which every rank sends
S / n: (n - 1) (S / n / bandwidth + step). An all-reduce is one after the other (Patarasuk and Yuan, 2009; NCCL's bus
bandwidth, nccl-tests doc/PERFORMANCE.md). Which of them an engine runs, and how often: Rajbhandari and others, "ZeRO",
2020, section 7, and FSDP2's own rule for blocks that reshard after forward.

Left out: overlap with the backward (DDP and FSDP2 hide a part), trees and NVLS (fewer steps on many hosts), cards whose
peers are not reachable (GeForce 40 and 50: each byte passes the host's memory), and more than one adapter a host.
"""

from __future__ import annotations

from dataclasses import dataclass

from memfit.device.hardware.catalogue import Interconnect
from memfit.engine.capabilities import CAPABILITIES
from memfit.engine.ddp import BUCKET_BYTES
from memfit.errors import InputError


@dataclass(frozen=True, kw_only=True)
class Volume:
    """What one rank tells the others in one window, in bytes of whole tensors, and by how many collectives."""

    all_gathered: int
    reduce_scattered: int
    collectives: int
    """All-gathers and reduce-scatters; an all-reduce counts as one of each."""
    reductions: int
    """Reduce-scatters among them."""


def window_volume(
    engine: str,
    nbytes: int,
    *,
    micro_batches: int = 1,
    units: int | None = None,
    sync_each_micro_batch: bool = False,
) -> Volume:
    """What an engine communicates in one window.

    Args:
        nbytes: of the trained parameters as they are communicated, which is also that of their gradients.
        micro_batches: of one rank in the window.
        units: for FSDP2 and ZeRO 3 the modules gathered one by one, else buckets; None: buckets of DDP's size,
            which ZeRO's match within a factor of a few.
        sync_each_micro_batch: gradients are reduced after every micro-batch and not once a window.

    Raises:
        InputError: an engine that is not known.
    """
    count = units or max(1, -(-nbytes // BUCKET_BYTES))
    reductions = micro_batches if sync_each_micro_batch else 1
    if engine not in CAPABILITIES:
        raise InputError(f"engine {engine!r}", f"not one of {', '.join(CAPABILITIES)}", "write one of them")
    does = CAPABILITIES[engine]
    if not does.several_ranks:
        return Volume(all_gathered=0, reduce_scattered=0, collectives=0, reductions=0)
    if does.reduces_each_micro_batch:
        reductions = micro_batches
    if does.shards_weights:
        gathers = 2 * micro_batches
    else:
        gathers = 1 if does.shards_optimizer else reductions
    return Volume(
        all_gathered=nbytes * gathers,
        reduce_scattered=nbytes * reductions,
        collectives=count * (gathers + reductions),
        reductions=count * reductions,
    )


def communication_seconds(
    engine: str,
    nbytes: int,
    world: int,
    interconnect: Interconnect,
    *,
    micro_batches: int = 1,
    units: int | None = None,
    sync_each_micro_batch: bool = False,
    replicas: int = 1,
) -> float:
    """Seconds of one window that the interconnect is busy, none of them hidden; 0 for one rank.

    Args:
        nbytes, micro_batches, units, sync_each_micro_batch: as of ``window_volume``.
        world: ranks, joined in one ring by ``interconnect``: with several hosts, by the slowest link.
        replicas: times that these ranks are there; what each scattered is then summed over them (HSDP).
    """
    if world < 2:
        return 0.0
    volume = window_volume(
        engine, nbytes, micro_batches=micro_batches, units=units, sync_each_micro_batch=sync_each_micro_batch
    )
    sent = (volume.all_gathered + volume.reduce_scattered) * (world - 1) / world
    sent += 2 * volume.reduce_scattered / world * (replicas - 1) / replicas
    steps = volume.collectives * (world - 1) + 2 * volume.reductions * (replicas - 1)
    return sent / interconnect.bytes + steps * interconnect.step_seconds
