"""The chain of a run over ranks: what every rank must agree on before the first window, printed by rank 0."""

from __future__ import annotations

import platform
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from memfit.batch.windows import Windows
from memfit.engine.collectives import gather
from memfit.engine.protocol import Engine
from memfit.errors import InputError
from memfit.plan import Plan
from memfit.train.data.stream import StreamWindows

SHOWN = 3
"""Windows whose samples are compared."""


@dataclass(frozen=True, kw_only=True)
class RankAgreement:
    """One rank's view of the run."""

    world: int
    mesh: str
    plan: str
    """Checksum of the plan."""
    samples: int
    """Of the data set; 0 where it can only be iterated."""
    windows_per_epoch: int
    first_sample: int
    """Checksum of the first sample, which every rank must see; 0 where it cannot be compared."""
    first_window: int
    first_ids: tuple[tuple[tuple[int, ...], ...], ...]
    """Of the first windows, the samples of each rank."""
    machine: str = field(default_factory=platform.node)
    """The name of the rank's machine."""

    def lines(self, plan: Plan) -> list[str]:
        """What rank 0 prints."""
        ids = "; ".join(
            f"rank {rank}: {' '.join(map(str, own[:8]))}{' …' if len(own) > 8 else ''}" if own else f"rank {rank}: none"
            for rank, own in enumerate(self.first_ids[0])
        )
        return [
            f"{plan.arithmetic}, {plan.engine}, {self.mesh}",
            (
                f"{self.samples} samples, {self.windows_per_epoch} optimizer steps an epoch; "
                if self.samples
                else "samples of a stream, by position; "
            )
            + f"window {self.first_window}: {ids}",
        ]


def rank_agreement_of(
    engine: Engine,
    plan: Plan,
    windows: Windows | StreamWindows,
    *,
    size: int,
    first: int,
    last: int,
    first_sample: int = 0,
) -> RankAgreement:
    """This rank's view.

    Args:
        size: samples of the data set; 0 where it can only be iterated.
        first, last: the run's windows are [first, last).
        first_sample: checksum of the first sample; 0: it cannot be compared.
    """
    shown = [windows.window(number) for number in range(first, max(min(first + SHOWN, last), first + 1))]
    mesh = (
        "one rank"
        if engine.mesh is None
        else "mesh "
        + " x ".join(f"{name} {engine.mesh.size(axis)}" for axis, name in enumerate(engine.mesh.mesh_dim_names or ()))
    )
    return RankAgreement(
        world=engine.world,
        mesh=mesh,
        plan=f"{zlib.crc32(repr(plan).encode()):08x}",
        samples=size,
        windows_per_epoch=windows.per_epoch(shown[0].epoch),
        first_sample=first_sample,
        first_window=first,
        first_ids=tuple(tuple(window.ids_of([rank]) for rank in range(engine.data_world)) for window in shown),
    )


def check_rank_agreement(engine: Engine, chain: RankAgreement) -> None:
    """Raises InputError on every rank where the ranks' views differ, with the numbers of each."""
    everyone = [asdict(view) for view in gather(engine, chain)]
    for key in everyone[0]:
        if _differs(key, everyone):
            numbers = "; ".join(f"rank {rank}: {_short(view[key])}" for rank, view in enumerate(everyone))
            raise InputError(
                f"{key.replace('_', ' ')} of {numbers}",
                "the ranks are not in one run",
                "give every rank the same plan, data set and order, none of it taken from the rank",
            )


def _differs(key: str, everyone: Sequence[Mapping[str, Any]]) -> bool:
    """Whether the ranks' views differ in a part.

    The first of samples that have an index is compared within a machine: others may round differently when they read.
    """
    if key == "machine":
        return False
    if key != "first_sample" or not everyone[0]["samples"]:
        return len({view[key] for view in everyone}) > 1
    known = {(view["machine"], view[key]) for view in everyone if view[key]}
    return len(known) > len({machine for machine, _ in known})


def _short(value: object) -> str:
    text = str(value)
    return text if len(text) <= 160 else text[:159] + "…"
