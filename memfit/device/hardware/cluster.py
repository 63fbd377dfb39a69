"""Cluster: nodes of equal cards, the link inside a node and the network between nodes, as a ring of NCCL uses them.

A ring's bandwidth is that of its slowest hop. Inside a node a hop takes the card's own link. Between nodes a ring of
which k ranks are in each node has k cards' shares of the node's adapters: NCCL makes a channel for each, and groups of
the same dimension communicate at the same time. Steps between nodes: NCCL src/graph/tuning.cc, ``nInterSteps``.

Left out: switches that are shared between nodes, and nodes that are not all the same.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from memfit.device.hardware.catalogue import Device, Interconnect, find_network, interconnect_of, networks
from memfit.errors import InputError
from memfit.mesh import MeshShape, joined_name


@dataclass(frozen=True, kw_only=True)
class GroupLink:
    """What joins the ranks of one group."""

    ranks: int
    nodes: int
    """Nodes that the group has ranks in."""
    bytes: float
    """A second and rank, in one direction."""
    step_seconds: float
    """Of a step of a ring inside a node."""
    node_step_seconds: float
    """Of a step from node to node."""

    @property
    def ring_seconds(self) -> float:
        """Seconds of all steps of an all-gather or reduce-scatter, without what they carry."""
        steps, between = self.ranks - 1, self.nodes - 1
        return (steps - between) * self.step_seconds + between * self.node_step_seconds


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """Cards in nodes. ``network`` is what one card has of its node's adapters; None where there is one node."""

    nodes: int
    cards: int
    """Of one node."""
    link: Interconnect
    network: Interconnect | None = None

    def joins(self, mesh: MeshShape, dimension: str) -> GroupLink:
        """The link of a mesh's groups in one dimension: neighbours differ in the last dimension first. Those that share
        a replica's parameters are of all ``SHARDING`` dimensions together, and are asked for as ``dp_shard``;
        those that send each other tokens by the name of all their dimensions."""
        if dimension == "dp_shard" and mesh.shards > mesh.dp_shard:
            return self._group(mesh.tp * mesh.ep, mesh.shards)
        if dimension == joined_name(mesh.expert_dimensions):
            return self._group(mesh.tp * mesh.ep, mesh.sending)
        sizes = list(mesh.sizes().items())
        inner = 1
        for name, size in reversed(sizes):
            if name == dimension:
                return self._group(inner, size)
            inner *= size
        return self._group(1, 1)

    def joins_all(self) -> GroupLink:
        """The link of a group of all ranks."""
        return self._group(1, self.nodes * self.cards)

    def crosses(self, mesh: MeshShape, dimension: str) -> bool:
        """Whether ranks of one group in this dimension are in several nodes."""
        return self.joins(mesh, dimension).nodes > 1

    def _group(self, stride: int, size: int) -> GroupLink:
        inside = max(1, min(size, self.cards // stride))
        nodes = -(-size // inside)
        bandwidth, between = self.link.bytes, self.link.step_seconds
        if nodes > 1:
            assert self.network is not None
            shares = inside * self.network.bytes
            bandwidth = min(bandwidth, shares)
            between = self.network.step_seconds
        return GroupLink(
            ranks=size, nodes=nodes, bytes=bandwidth, step_seconds=self.link.step_seconds, node_step_seconds=between
        )

    def words(self) -> str:
        """Both links, in words."""
        inside = f"{self.link.name} at {self.link.bytes / 1e9:g} GB/s between the {self.cards} cards of a node"
        if self.network is None:
            return inside
        return (
            f"{inside}, {self.network.name} at {self.network.bytes / 1e9:g} GB/s a card between the {self.nodes} nodes"
        )


def cluster_of(device: Device, devices: int, nodes: int, network: str | None = None) -> Cluster:
    """The cluster of so many devices on so many nodes.

    Args:
        network: ``infiniband-ndr`` or ``8xinfiniband-ndr``: adapters of a node, by default one; None: as the catalogue
            has it for the card.

    Raises:
        InputError: the devices do not divide over the nodes, or a link is not known.
    """
    if devices % nodes:
        seen, why = f"--devices {devices} --nodes {nodes}", f"{devices} devices do not divide over {nodes} nodes"
        raise InputError(seen, why, f"write --nodes {_divisor(devices, nodes)}, or another number of devices")
    if not device.is_cuda:
        seen = f"--nodes with --device {device.key}"
        raise InputError(seen, "links between nodes are known of cards alone", "name a card: --device h100")
    cards, link = devices // nodes, interconnect_of(device)
    if link is None:
        why = f"the link between cards of {device.key} is not known"
        raise InputError(f"--nodes {nodes}", why, "write --mesh instead, or add the card's link: memfit devices --add")
    if nodes == 1:
        if network is not None:
            raise InputError(f"--network {network} --nodes 1", "there is one node", "leave --network out")
        return Cluster(nodes=1, cards=cards, link=link)
    return Cluster(nodes=nodes, cards=cards, link=link, network=_network(device, cards, network))


def _network(device: Device, cards: int, network: str | None) -> Interconnect:
    """What one card has of its node's adapters."""
    if network is None:
        known = next((each for each in networks().values() if each.name == device.network), None)
        if known is None or device.network_bytes is None:
            why = f"what joins nodes of {device.key} is not known"
            raise InputError("--nodes without --network", why, "write --network 8xinfiniband-ndr (adapters of a node)")
        return replace(known, bytes=device.network_bytes)
    counted = re.fullmatch(r"(\d+)\s*x\s*(.+)", network.strip())
    count, name = (int(counted[1]), counted[2]) if counted else (1, network.strip())
    adapter = find_network(name)
    if count < 1:
        raise InputError(f"--network {network}", "a node has an adapter at least", f"write --network 1x{adapter.key}")
    return replace(adapter, bytes=adapter.bytes * count / cards)


def _divisor(devices: int, nodes: int) -> int:
    return max(number for number in range(1, nodes + 1) if devices % number == 0)
