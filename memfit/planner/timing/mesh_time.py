"""Seconds that the ranks of a cluster tell each other in a window, by collective and dimension of the mesh.

Data parallelism communicates beside the computation: FSDP2 gathers the next module's parameters while the present one
computes, and scatters gradients while the backward goes on; DDP reduces buckets during the last backward. So a
micro-batch waits for what is longer than its computation, and at least for the first or last piece. A pipeline's stages
gather once, beside the first forward, and scatter once, or sum over their replicas, after the last backward, beside
which nothing is computed; so do replicas of cut layers that are not sharded.
Collectives inside of layers (tensor parallelism) are operators of the trace: what follows waits for them
(``memfit.planner.timing.collective_time``). Which collectives an engine runs: as in
``memfit.planner.timing.communication``.

Left out: a link that two dimensions use at the same time, and kernels that slow down while a collective runs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from memfit.device.hardware.cluster import GroupLink
from memfit.engine.capabilities import CAPABILITIES
from memfit.engine.ddp import BUCKET_BYTES
from memfit.mesh import OF_EXPERTS, joined_name
from memfit.planner.timing.collective_time import gather_seconds, reduce_seconds

REPLICAS, SHARDS, STAGES, TOKENS = "dp_replicate", "dp_shard", "pp", "dp_shard_in_ep"
"""Dimensions of a mesh: of ranks that take samples of their own, those that hold a pipeline's stages, and those that
send each other tokens."""
BACKWARD = 2 / 3
"""Of a micro-batch's computation, what is left of its backward when it begins: it does twice its forward's work."""


@dataclass(frozen=True, kw_only=True)
class DataTraffic:
    """What data parallelism carries for one rank."""

    nbytes: int
    """Of the trained parameters of the rank's replica, after layers were cut: of whole tensors, as communicated."""
    pieces: int
    """Modules that are gathered one by one; buckets, where none are."""
    expert_bytes: int = 0
    """Beside ``nbytes``, those of the rank's experts, which are gathered from the ranks of ``dp_shard`` alone where it
    sends tokens to those of ``dp_shard_in_ep``."""


@dataclass(frozen=True, kw_only=True)
class MeshCommunication:
    """Communication of data-parallel ranks on an engine.

    Attributes:
        links: what joins the ranks of each dimension.
    """

    engine: str
    traffic: DataTraffic
    links: Mapping[str, GroupLink]

    @property
    def each_micro_batch(self) -> bool:
        """Whether it gathers and scatters in every micro-batch. Stages of a pipeline do so once in a window, in which
        they keep what they gathered; replicas that are not sharded sum their gradients once."""
        return CAPABILITIES[self.engine].shards_weights and STAGES not in self.links and SHARDS in self.links

    @property
    def _experts(self) -> GroupLink | None:
        """What joins the ranks that share a rank's experts; None where it has them alone."""
        shards, sent = self.links.get(SHARDS), self.links.get(joined_name(OF_EXPERTS), self.links.get(TOKENS))
        if shards is None or sent is None or shards.ranks == sent.ranks:
            return None
        ranks = shards.ranks // sent.ranks
        return replace(shards, ranks=ranks, nodes=min(shards.nodes, ranks))

    def busy_seconds(self) -> dict[str, float]:
        """Seconds by collective: of a micro-batch, or of a window where not each of them gathers."""
        nbytes, pieces = self.traffic.nbytes, self.traffic.pieces
        shards, replicas = self.links.get(SHARDS), self.links.get(REPLICAS)
        seconds: dict[str, float] = {}
        if not CAPABILITIES[self.engine].shards_weights:
            if replicas is not None:
                seconds[f"all_reduce over {REPLICAS}"] = pieces * reduce_seconds(nbytes / pieces, replicas)
            return seconds
        if shards is not None:
            once = pieces * gather_seconds(nbytes / pieces, shards)
            if self._experts is not None:
                once += pieces * gather_seconds(self.traffic.expert_bytes / pieces, self._experts)
            times = 2 if self.each_micro_batch else 1
            seconds |= {f"all_gather over {SHARDS}": times * once, f"reduce_scatter over {SHARDS}": once}
        if replicas is not None:
            part = nbytes / (shards.ranks if shards is not None else 1)
            part += self.traffic.expert_bytes / (self._experts.ranks if self._experts is not None else 1)
            seconds[f"all_reduce over {REPLICAS}"] = pieces * reduce_seconds(part / pieces, replicas)
        return seconds

    def window_seconds(self, micro_batches: int) -> dict[str, float]:
        """Seconds by collective of a window, whether computation hides them or not."""
        times = micro_batches if self.each_micro_batch else 1
        return {name: each * times for name, each in self.busy_seconds().items()}

    def __call__(self, micro_batches: int, computed: float = 0.0) -> float:
        """Seconds of a window that computation does not hide.

        Args:
            computed: seconds that the window's micro-batches compute, all together.
        """
        each = self.busy_seconds()
        busy, beside = sum(each.values()), computed / micro_batches
        if CAPABILITIES[self.engine].shards_weights and not self.each_micro_batch:
            gathers, scatters = (
                each.get(f"all_gather over {SHARDS}", 0.0),
                each.get(f"reduce_scatter over {SHARDS}", 0.0),
            )
            sums = each.get(f"all_reduce over {REPLICAS}", 0.0)
            return max(gathers - (1 - BACKWARD) * beside, gathers / self.traffic.pieces) + scatters + sums
        if CAPABILITIES[self.engine].shards_weights:
            return micro_batches * max(busy - beside, busy / self.traffic.pieces)
        return max(busy - BACKWARD * beside, busy / self.traffic.pieces)


def pieces_of(nbytes: int, units: int | None) -> int:
    """How many collectives carry parameters of so many bytes: one for each unit, else DDP's buckets."""
    return units or max(1, -(-nbytes // BUCKET_BYTES))
