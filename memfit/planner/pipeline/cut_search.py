"""The search for a pipeline's cut: proposals of the stage model, which traces of whole ranks then correct."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise

from memfit.device.hardware.catalogue import Device, nccl_bytes
from memfit.device.hardware.cluster import GroupLink
from memfit.engine.pipeline_cut import STAGES_OF_RANK
from memfit.geometry import Geometry
from memfit.job import Shape
from memfit.mesh import MeshShape, communicators
from memfit.planner.pipeline.pipeline_costs import PipelineCosts
from memfit.planner.pipeline.stage_figures import StageFigures
from memfit.planner.pipeline.stage_model import StageModel
from memfit.planner.timing.interleaved_time import interleaved_seconds
from memfit.planner.timing.schedule_time import schedule_seconds

LARGER = 8
"""Times as large as a micro-batch whose costs are traced: the next one. Where launches take most of the time, and where
arithmetic does, the time grows along other lines."""
WORTH = 0.01
"""Of a window's time: what another cut must be estimated to save before it is planned."""


@dataclass(frozen=True, kw_only=True)
class WindowChoice:
    """How a window is divided, and what is recomputed in it."""

    geometry: Geometry
    modes: Mapping[str, str]

    @property
    def micro_batches(self) -> int:
        """Of one rank's window."""
        return len(self.geometry.micro_batches[0])


@dataclass(frozen=True, kw_only=True)
class ProposedCut:
    """A cut, the window that it is proposed for, and what the model says of both."""

    bounds: tuple[int, ...]
    window: WindowChoice
    seconds: float
    """Of a window: without sends, communication and the optimizers' steps."""
    peak: int
    """Bytes of the stage that needs most."""
    figures: tuple[StageFigures, ...]
    ranks: int
    """Of the pipeline: stage s is on rank s modulo so many."""

    @property
    def first_modules(self) -> list[str]:
        """The first module of each stage."""
        return [stage.first_module for stage in self.figures]

    @property
    def rank_seconds(self) -> list[float]:
        """Of each rank of the pipeline, what its stages take for a micro-batch."""
        seconds = [stage.seconds for stage in self.figures]
        return [sum(seconds[rank :: self.ranks]) for rank in range(self.ranks)]

    @property
    def slowest(self) -> int:
        """The first of the pipeline's ranks that take most time."""
        return self.rank_seconds.index(max(self.rank_seconds))

    @property
    def shares(self) -> tuple[tuple[float, float], ...]:
        """Seconds of each stage's forward and backward, as multiples of what the slowest rank takes for both."""
        most = max(self.rank_seconds)
        return tuple((stage.forward_seconds / most, stage.backward_seconds / most) for stage in self.figures)


def traced_sizes(shape_of: Callable[[int], Shape], split: Sequence[Geometry]) -> list[Shape]:
    """The micro-batches whose costs are traced, of ways to split a batch: the smallest, and each some times as large as
    the one before, up to the largest.

    Args:
        shape_of: the shape of a micro-batch of so many units.
    """
    units = sorted({geometry.micro_batch for geometry in split})
    chosen = [units[0]]
    for before, each in pairwise(units):
        if each > LARGER * chosen[-1]:
            chosen.append(before if before > chosen[-1] else each)
    return list(dict.fromkeys(shape_of(each) for each in (*chosen, units[-1])))


def around(sizes: Sequence[Shape], units: int) -> list[Shape]:
    """The one or two of these micro-batches, in order, on whose line another one of so many units lies."""
    above = next((number for number, shape in enumerate(sizes) if shape.units >= units), len(sizes) - 1)
    return list(sizes[max(above - 1, 0) : above + 1])


def bytes_outside(device: Device, mesh: MeshShape) -> int:
    """Of a rank's memory, what its process holds beside tensors."""
    if not device.is_cuda:
        return 0
    return (device.context_bytes or 0) + communicators(mesh.world, mesh.sizes()) * nccl_bytes(device)[1]


class CutSearch:
    """Cuts of a job's nets for a mesh.

    Args:
        costs: of the job's modules.
        split: ways to divide the window, in any order.
        modes: of recomputing: the first with which some way fits.
        links: as of ``PipelineCosts.model``.
        schedule: that runs the stages.
    """

    def __init__(
        self, costs: PipelineCosts, mesh: MeshShape, device: Device, split: Sequence[Geometry],
        modes: Sequence[Mapping[str, str]], links: Mapping[str, GroupLink] | None = None, *, schedule: str = "1f1b",
    ) -> None:  # fmt: skip
        self._costs, self._mesh, self._links = costs, mesh, links
        self._sizes = traced_sizes(partial(costs.shape_of, mesh), split)
        self._windows = [[WindowChoice(geometry=geometry, modes=some) for geometry in split] for some in modes]
        self.budget, self._outside = device.usable_bytes or 0, bytes_outside(device, mesh)
        self._more = [0.0] * mesh.pp
        """Bytes of each rank for a unit of its micro-batch, beside what the model has."""
        self._schedule, self._each = schedule, STAGES_OF_RANK[schedule]
        self._tried: list[ProposedCut] = []

    def next(self, enough: float | None = None, *, smallest: bool = False) -> ProposedCut | None:
        """The cut to plan next: the one of the least time that fits, or that exceeds the budget least; None: none is
        left, or worth it.

        Args:
            enough: seconds of a window that fits, by the model; None: none is known.
            smallest: whether the one that needs least is asked for.
        """
        proposed = self._proposed()
        if enough is not None:
            proposed = [cut for cut in proposed if self._excess(cut) == 0 and cut.seconds < (1 - WORTH) * enough]
        if not proposed:
            return None
        best = min(proposed, key=(lambda cut: cut.peak) if smallest else self._order)
        self._tried.append(best)
        return best

    def others(self, best: ProposedCut, count: int) -> list[ProposedCut]:
        """The next best windows that fit by the model, each of another micro-batch than ``best``."""
        size = best.window.geometry.micro_batch
        fit = [cut for cut in self._proposed() if not self._excess(cut) and cut.window.geometry.micro_batch != size]
        return sorted(fit, key=lambda cut: cut.seconds)[:count]

    def learn(self, cut: ProposedCut, needs: Mapping[int, int]) -> None:
        """Takes over what traces say.

        Args:
            needs: bytes by rank of the pipeline; one that is absent needs as much beside the model as the one before.
        """
        model, more = self._model(cut.window), 0.0
        for rank in range(self._mesh.pp):
            if rank in needs:
                own = sum(
                    model.bytes_of(stage, cut.bounds[stage], cut.bounds[stage + 1], cut.window.micro_batches)
                    for stage in range(rank, model.stages, self._mesh.pp)
                )
                more = (needs[rank] - own - self._outside) / model.costs.units
            self._more[rank] = more

    def _proposed(self) -> list[ProposedCut]:
        """The best cut for each window, without those that were planned; where none fits, of all modes."""
        tried = [(cut.bounds, cut.window) for cut in self._tried]
        proposed: list[ProposedCut] = []
        for windows in self._windows:
            cuts = [self._best_cut(window) for window in windows]
            cuts = [cut for cut in cuts if (cut.bounds, cut.window) not in tried]
            if any(not self._excess(cut) for cut in cuts):
                return cuts
            proposed += cuts
        return proposed

    def _best_cut(self, window: WindowChoice) -> ProposedCut:
        model = self._model(window)
        bounds = model.bounds(window.micro_batches, self.budget)
        figures = model.figures(bounds)
        forward, backward = [f.forward_seconds for f in figures], [f.backward_seconds for f in figures]
        whole = max(map(sum, window.geometry.micro_batches)) / window.geometry.micro_batch
        cut = ProposedCut(
            bounds=bounds, window=window, seconds=self._seconds(forward, backward, window.micro_batches),
            peak=int(model.peak(bounds, window.micro_batches)), figures=figures, ranks=self._mesh.pp,
        )  # fmt: skip
        return replace(cut, seconds=cut.seconds - (window.micro_batches - whole) * max(cut.rank_seconds))

    def _seconds(self, forward: Sequence[float], backward: Sequence[float], micro_batches: int) -> float:
        if self._each > 1:
            return interleaved_seconds(self._schedule, forward, backward, self._mesh.pp, micro_batches)
        return schedule_seconds(forward, backward, micro_batches, gpipe=self._schedule == "gpipe")

    def _order(self, cut: ProposedCut) -> tuple[float, ...]:
        return self._excess(cut), cut.seconds, -cut.window.geometry.micro_batch

    def _excess(self, cut: ProposedCut) -> int:
        return max(cut.peak - self.budget, 0)

    def _model(self, window: WindowChoice) -> StageModel:
        units = self._costs.shape_of(self._mesh, window.geometry.micro_batch).units
        sizes = around(self._sizes, units)
        stages = self._mesh.pp * self._each
        model = self._costs.model(
            self._mesh, stages, sizes, units, window.modes, self._links, schedule=self._schedule
        )  # fmt: skip
        return replace(model, rest=[(self._outside + more * units) / self._each for more in self._more * self._each])
