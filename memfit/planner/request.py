"""PlanRequest: what a person asks ``memfit plan`` for, as it travels from the command line to the search."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from memfit.device.hardware.catalogue import Device, interconnect_of
from memfit.device.hardware.cluster import Cluster, GroupLink
from memfit.errors import InputError
from memfit.mesh import MeshShape, joined_name

KEEP = ("checkpointing", "optimizer", "precision", "validation")
"""Choices that a person can leave as the job has them."""
ALLOW = ("precision",)
"""Choices that change what is learned; the search makes them only where a person allows them."""


@dataclass(frozen=True, kw_only=True)
class PlanRequest:
    """A job's global batch on a device, and the choices that the search must respect.

    Raises:
        InputError: ``keep`` or ``allow`` names no choice, or both name the same; the micro-batch is larger than the
            global batch.
    """

    name: str
    """The job's name, as a plan file keeps it."""
    global_batch: int
    """Units that one optimizer step learns from, over all devices."""
    device: Device
    micro_batch: int | None = None
    """Units; None: the fastest micro-batch that fits."""
    devices: int = 1
    """Data-parallel ranks."""
    mesh: MeshShape | None = None
    """The ranks by dimension, of which ``devices`` take samples of their own; None: those alone."""
    cluster: Cluster | None = None
    """Nodes and links of the ranks; None: one node."""
    engine: str | None = None
    """None: the fastest engine that fits."""
    engine_choices: Mapping[str, Any] = field(default_factory=dict)
    """The engine's own choices, as ``memfit.engine.factory.CHOICES`` has them; of a mesh or a named engine alone."""
    seed: int = 0
    keep: Collection[str] = ()
    """Choices that stay as the job has them, of ``KEEP``."""
    allow: Collection[str] = ()
    """Choices that change what is learned and may be made, of ``ALLOW``."""
    tuned_for: int | None = None
    """The global batch that the job's learning rate was tuned for; None: unknown."""
    learning_rate_rule: str = "none"
    """How the learning rate follows the global batch: a rule of ``memfit.planner.lr_scaling``."""

    @property
    def world(self) -> int:
        """Ranks, each on a device of its own."""
        return self.devices if self.mesh is None else self.mesh.world

    @property
    def links(self) -> dict[str, GroupLink] | None:
        """What joins the ranks of each dimension of the mesh, and all ranks (""); None without a mesh, or where the
        card's link is not known.
        """
        link = interconnect_of(self.device)
        if self.mesh is None or (self.cluster is None and link is None):
            return None
        if self.cluster is None:
            assert link is not None
            cluster = Cluster(nodes=1, cards=self.world, link=link)
        else:
            cluster = self.cluster
        together = [joined_name(self.mesh.expert_dimensions)] if self.mesh.sending > 1 else []
        names = dict.fromkeys([*self.mesh.sizes(), *(["dp_shard"] if self.mesh.shards > 1 else []), *together])
        return {name: cluster.joins(self.mesh, name) for name in names} | {"": cluster.joins_all()}

    def __post_init__(self) -> None:
        _check_words("--keep", self.keep, KEEP)
        _check_words("--allow", self.allow, ALLOW)
        if "precision" in self.keep and "precision" in self.allow:
            seen = "--keep precision --allow precision"
            raise InputError(seen, "one says what the other forbids", "write one of them")
        if self.micro_batch is not None and self.micro_batch > self.global_batch:
            raise InputError(
                f"--micro-batch {self.micro_batch}",
                f"more than the global batch of {self.global_batch}",
                f"write {self.global_batch} or less",
            )


def _check_words(option: str, words: Collection[str], known: tuple[str, ...]) -> None:
    for word in sorted(words):
        if word not in known:
            raise InputError(f"{option} {word}", "no such choice", f"write some of {','.join(known)}")
