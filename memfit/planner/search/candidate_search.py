"""Drafts: ways to run one window, over micro-batches and selections, measured where that is worth it.

One micro-batch's shape is traced under every uniform choice (``traced_job``). For another micro-batch the same figures
are taken to grow with it, which ranks the rest; what ranks first is traced itself, but for uniform choices that follow
(``resized_trace``), until nothing unmeasured is noticeably faster.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import islice
from operator import attrgetter
from typing import Any

import numpy as np

from memfit.device.hardware.catalogue import Device
from memfit.geometry import Geometry
from memfit.job import Shape
from memfit.mesh import MeshShape
from memfit.planner.prediction import need_on
from memfit.planner.search.batch_splits import geometries, without_single_items
from memfit.planner.search.engine_choice import Communicates, silent
from memfit.planner.search.selection import Problem, floor, least_seconds, scaled, solve
from memfit.planner.search.traced_job import TracedJob
from memfit.planner.timing.pipeline_time import ONE_STAGE, PipelineTime
from memfit.planner.timing.probed_windows import ProbedWindow, probed
from memfit.trace.session import MicroTrace

EXPLORED = 3
"""Micro-batches whose selections are traced, at most."""
LARGER = 4
"""Times as large as the largest micro-batch that keeps everything: where the time of larger ones is looked up."""
WORTH = 0.01
"""Of a window's time: what a micro-batch must be estimated to save before its uniform choices are traced. Estimates
were off by up to 1.3 % (LatentSync stage 1 on 24 GB), so that less would be chance."""
ROUGH = 0.01
"""How near the least seconds of a choice are looked for, where the choice is only estimated."""


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """One way to run a window."""

    geometry: Geometry
    modes: Mapping[str, str]
    seconds: float | None
    """Seconds of the window; None where the device's rates are not known."""
    rank: float
    """The value by which candidates are compared: seconds, or work where seconds are not known."""
    peak: int
    """Process bytes of a micro-batch's forward and backward."""
    fits: bool
    traced: bool
    """Whether these were traced, or follow from another micro-batch."""
    micro_seconds: float
    """Of ``rank``, what one of its micro-batches takes, without what it waits for other ranks."""


class CandidateSearch:
    """The drafts of one job, global batch and device."""

    def __init__(
        self, traced_job: TracedJob, device: Device, global_batch: int, ranks: int, *,
        mesh: MeshShape | None = None, fixed: int | None = None, modes: Mapping[str, str] | None = None,
        communicates: Communicates = silent, pipeline: PipelineTime = ONE_STAGE,
    ) -> None:  # fmt: skip
        """``ranks``: those with samples of their own; ``mesh``: all; ``fixed``: the micro-batch; ``modes``: the
        checkpointing, where it is not to be chosen; ``pipeline``: the stages that wait for each other."""
        self.ranks, self._communicates = ranks, communicates
        self._world, self._mesh = (ranks, {}) if mesh is None else (mesh.world, mesh.sizes())
        self._sent = 0.0
        """Bytes that a stage of a pipeline sends for a unit of a micro-batch."""
        self.traced_job, self.device, self.modes = traced_job, device, modes
        self.pipeline = pipeline
        self.job = traced_job.job
        self.budget = device.usable_bytes or 0
        split = geometries(self.job, global_batch, ranks, self._world // ranks, fixed)
        self.geometries, self.refuses_single = without_single_items(traced_job, split, modes or {})
        """What the nets raise at a micro-batch of one item, with which no geometry is left; empty: nothing."""
        self.step_seconds = traced_job.step_seconds()
        self.tried: dict[int, Candidate] = {}
        self._measured: dict[int, tuple[Problem, float, float]] = {}
        self._kept_seconds: dict[int, float] = {}
        self._kept_peaks: dict[int, int] = {}
        self._estimates: dict[tuple[Any, ...], Candidate] = {}
        self._resident = 0
        self.probed = probed(self.job, device)
        self.slower = self._slower(self.probed) if self.probed is not None and traced_job.knows_rates else 1.0
        """Times the estimate that a window took which was really run on this machine."""

    def best(self) -> Candidate | None:
        """The draft of the least time among those that fit; ties go to the larger micro-batch."""
        self._measure(self._start())
        for _ in range(EXPLORED):
            best = self._best_tried()
            rest = [g for g in self.geometries if g.micro_batch not in self.tried]
            rest = [g for g in rest if self.least(g) < self._enough(best, g)]
            over = [g for g in rest if self.kept_peak(g.micro_batch) > self.budget]
            if over and not self._measured:
                self._observe(over[-1])
            rest = [g for g in rest if self.bound(g) < self._enough(best, g)]
            worth = (some for some in self.ranked(rest) if some.rank < self._enough(best, some.geometry))
            first = next(worth, None)
            if first is None:
                break
            self._measure(first.geometry)
        return self._best_tried() or self._fallback()

    def alternatives(self, best: Candidate) -> list[Candidate]:
        """The three next best that fit, each of another micro-batch."""
        others = [some for micro, some in self.tried.items() if micro != best.geometry.micro_batch and some.fits]
        known = {best.geometry.micro_batch, *self.tried}
        rest = self.ranked(g for g in self.geometries if g.micro_batch not in known)
        ordered = heapq.merge(sorted(others, key=attrgetter("rank")), rest, key=attrgetter("rank"))
        return list(islice(ordered, 3))

    def seconds(self, geometry: Geometry, micro_seconds: float) -> float | None:
        """Seconds of a window of such micro-batches; None where the device's rates are not known."""
        return self._window(geometry, micro_seconds) * self.slower if self.traced_job.knows_rates else None

    def shape(self, geometry: Geometry) -> tuple[Shape, bool]:
        """The shape of its micro-batches, and whether gradients are accumulated over several."""
        return self._shape_of(geometry.micro_batch), len(geometry.micro_batches[0]) > 1

    def ranked(self, geometries: Iterable[Geometry], budget: int | None = None) -> Iterator[Candidate]:
        """Estimates of those that fit, the fastest first and of equal ones the larger micro-batch.

        One is estimated when no other can be faster by its bound: whoever takes the first few has no others made.
        """
        waiting: list[tuple[float, int, int, Geometry | Candidate]] = []
        for geometry in geometries:
            heapq.heappush(waiting, (self.least(geometry), -geometry.micro_batch, 0, geometry))
        while waiting:
            _, size, times, first = heapq.heappop(waiting)
            if isinstance(first, Candidate):
                yield first
            elif times == 0:
                heapq.heappush(waiting, (self.bound(first, budget), size, 1, first))
            else:
                estimate = self.estimate(first, budget)
                if estimate.fits:
                    heapq.heappush(waiting, (estimate.rank, size, 2, estimate))

    def bound(self, geometry: Geometry, budget: int | None = None) -> float:
        """A rank that its estimate is not below; infinite where it does not fit."""
        limit, micro = self.budget if budget is None else budget, geometry.micro_batch
        if self.kept_peak(micro) <= limit:
            return self.least(geometry)
        problem, outside = self._problem(micro)
        more = least_seconds(problem, limit - outside)
        return self._window(geometry, self.kept_seconds(micro) + more) if np.isfinite(more) else np.inf

    def estimate(self, geometry: Geometry, budget: int | None = None) -> Candidate:
        """Estimates a micro-batch from the nearest measured one, to ``ROUGH`` of what it recomputes."""
        limit = self.budget if budget is None else budget
        known = tuple(frozenset(some) for some in (self._measured, self._kept_seconds, self._kept_peaks))
        key = (geometry.micro_batch, limit, known)
        if key not in self._estimates:
            self._estimates[key] = self._estimate(geometry, limit)
        return self._estimates[key]

    def _problem(self, micro: int) -> tuple[Problem, float]:
        """The program of a micro-batch as it follows from the nearest measured one, and its bytes outside of it."""
        if not self._measured:
            self._observe(next(g for g in self.geometries if g.micro_batch in self.tried))
        near = min(self._measured, key=lambda measured: abs(np.log(measured / micro)))
        problem, seconds, outside = self._measured[near]
        fixed = max(self.kept_peak(0) - self._resident, 0.0) if len(self._kept_peaks) > 1 else 0.0
        return scaled(problem, micro / near, self.kept_seconds(micro) / seconds, fixed), outside

    def _estimate(self, geometry: Geometry, limit: int) -> Candidate:
        micro = geometry.micro_batch
        kept = self.kept_seconds(micro)
        if self.kept_peak(micro) <= limit:
            return self._draft(geometry, self.modes or {}, kept, self.kept_peak(micro), fits=True, traced=False)
        other, outside = self._problem(micro)
        choice = solve(other, limit - outside, gap=ROUGH)
        fits = choice is not None
        if choice is None:
            choice = floor(other)
        modes = other.modes(choice) if self.modes is None else self.modes
        seconds = kept + other.seconds(choice)
        return self._draft(geometry, modes, seconds, int(other.peak(choice) + outside), fits=fits, traced=False)

    def least(self, geometry: Geometry) -> float:
        """The rank of a micro-batch that recomputes nothing, fits or not."""
        return self._window(geometry, self.kept_seconds(geometry.micro_batch))

    def kept_peak(self, micro: int) -> int:
        """Process bytes of one micro-batch that recomputes nothing: by the line through two that were traced."""
        low, high = min(self._kept_peaks), max(self._kept_peaks)
        slope = (self._kept_peaks[high] - self._kept_peaks[low]) / max(high - low, 1)
        return int(self._kept_peaks[low] + slope * (micro - low))

    def kept_seconds(self, micro: int) -> float:
        """Seconds of a micro-batch that recomputes nothing: by the line through the nearest two traced ones.

        A part of the time is the micro-batch's own, whatever its size: launches, weights that are read.
        """
        points = sorted(self._kept_seconds)
        if len(points) == 1:
            return self._kept_seconds[points[0]] * micro / points[0]
        above = min(max(int(np.searchsorted(points, micro)), 1), len(points) - 1)
        (low, first), (high, last) = ((point, self._kept_seconds[point]) for point in points[above - 1 : above + 1])
        slope = max((last - first) / (high - low), 0.0)
        return max(first + slope * (micro - low), first * min(micro / low, 1.0))

    def peak_of(self, micro_trace: MicroTrace) -> int:
        """Process bytes of a traced micro-batch, replayed on the device; where it does not fit, what it would take."""
        need = need_on(micro_trace.trace, self.device, self._world, mesh=self._mesh)
        return need.process_bytes["train"] if need.fits else self.unlimited_peak_of(micro_trace)

    def unlimited_peak_of(self, micro_trace: MicroTrace) -> int:
        """Process bytes of a traced micro-batch where the allocator never has to give anything back."""
        device = unlimited(self.device)
        return need_on(micro_trace.trace, device, self._world, mesh=self._mesh).process_bytes["train"]

    def _enough(self, best: Candidate | None, geometry: Geometry) -> float:
        """The rank below which a micro-batch is worth its tracing."""
        if best is None:
            return np.inf
        return best.rank if geometry.micro_batch in self._measured else (1 - WORTH) * best.rank

    def _best_tried(self) -> Candidate | None:
        traced_job = [candidate for candidate in self.tried.values() if candidate.fits]
        return (
            min(traced_job, key=lambda candidate: (candidate.rank, -candidate.geometry.micro_batch))
            if traced_job
            else None
        )

    def _fallback(self) -> Candidate | None:
        """Smaller micro-batches, until one fits; where none does, the smallest is left among the tried."""
        expected = self._expected()
        for geometry in self.geometries:
            if geometry.micro_batch < min(self.tried) and geometry.micro_batch <= expected:
                self._measure(geometry)
                if self.tried[geometry.micro_batch].fits:
                    return self.tried[geometry.micro_batch]
        last = self.geometries[-1]
        if last.micro_batch not in self.tried:
            self._measure(last)
        return self._best_tried()

    def _expected(self) -> int:
        """The largest micro-batch that should fit by what was measured; the smallest where none should."""
        traced_job = [g.micro_batch for g in self.geometries if self.estimate(g).fits]
        return max(traced_job, default=self.geometries[-1].micro_batch)

    def _start(self) -> Geometry:
        """The largest micro-batch that should fit as it is, by the smallest's trace and a line."""
        small = self.geometries[-1]
        self._begin(near for near in self._near(small) if near[0] != small.micro_batch)
        traced = self._trace_kept(small.micro_batch)
        self._resident = base = self.traced_job.resident(traced)
        slope = max(self.unlimited_peak_of(traced) - base, 1) / small.micro_batch
        most = max((self.budget - base) / slope, 0)
        start = next((g for g in self.geometries if g.micro_batch <= most), small)
        larger, *others = self._near(start)
        if larger[0] not in self._kept_seconds:
            self._begin(others)
            self._trace_kept(larger[0])
        return start

    def _begin(self, near: Iterable[tuple[int, bool]]) -> None:
        """Has micro-batches traced on a second core, which has nothing to do until the smallest one is known."""
        for micro, accumulated in near:
            self.traced_job.begin_trace(self._shape_of(micro), self.modes or {}, accumulated=accumulated)

    def _near(self, start: Geometry) -> list[tuple[int, bool]]:
        """Micro-batches that are traced where one is the largest that should fit, and whether with gradients of an
        earlier one: a larger one whose time is looked up, that one, and the next larger one."""
        larger = next(g.micro_batch for g in self.geometries if g.micro_batch <= LARGER * start.micro_batch)
        beyond = self.geometries[max(self.geometries.index(start) - 1, 0)]
        near = {larger: True}
        for geometry in (start, beyond) if self.modes is None else (start,):
            near.setdefault(geometry.micro_batch, self.shape(geometry)[1])
        return list(near.items())

    def _shape_of(self, micro: int) -> Shape:
        return self.traced_job.how.shape_of(self.job, micro)

    def _trace_kept(self, micro: int) -> MicroTrace:
        """A micro-batch as it is, with gradients of an earlier one; notes its seconds."""
        traced = self.traced_job.trace(self._shape_of(micro), self.modes or {}, accumulated=True)
        self._kept_seconds[micro] = self.traced_job.total_seconds(traced)
        self._kept_peaks[micro] = self.unlimited_peak_of(traced)
        self._sent = self.traced_job.sent_bytes(self._shape_of(micro)) / micro
        return traced

    def _measure(self, geometry: Geometry) -> None:
        """Traces a micro-batch: as it is, and where that does not fit, under its best selection."""
        micro = geometry.micro_batch
        shape, accumulated = self.shape(geometry)
        kept = self.traced_job.trace(shape, self.modes, accumulated=accumulated) if self.modes else None
        kept = kept or self.traced_job.kept(shape, accumulated=accumulated)
        peak, seconds = self.peak_of(kept), self.traced_job.total_seconds(kept)
        self._kept_peaks.setdefault(micro, self.unlimited_peak_of(kept))
        self._kept_seconds[micro] = seconds
        if peak <= self.budget or self.modes is not None:
            self.tried[micro] = self._draft(
                geometry, self.modes or {}, seconds, peak, fits=peak <= self.budget, traced=True
            )
            if self.modes is not None:
                resident = float(self.traced_job.resident(kept))
                only = Problem(ways=[], base=np.array([float(peak)]), bytes=[], resident=resident)
                self._measured[micro] = (only, seconds, 0.0)
            return
        outside = self._observe(geometry)
        on_host = dict.fromkeys(self.traced_job.blocks(shape, accumulated=accumulated), "offload")
        self.traced_job.begin_trace(shape, on_host, accumulated=accumulated)  # an option, should this one be chosen
        chosen = self.traced_job.select(shape, self.budget, self.peak_of, accumulated=accumulated, outside=outside)
        fits = chosen is not None
        if chosen is None:
            chosen = self.traced_job.lowest(shape, self.peak_of, accumulated=accumulated)
        seconds += chosen.more_seconds
        self.tried[micro] = self._draft(geometry, chosen.modes, seconds, chosen.peak, fits=fits, traced=True)

    def _observe(self, geometry: Geometry) -> float:
        """Traces a micro-batch under every uniform choice; gives its bytes outside of tensors."""
        shape, accumulated = self.shape(geometry)
        problem = self.traced_job.problem(shape, accumulated=accumulated)
        observed = self.traced_job.observed(shape, accumulated=accumulated)
        outside = self.unlimited_peak_of(self.traced_job.kept(shape, accumulated=accumulated)) - observed.keep.peak
        self._measured[geometry.micro_batch] = (problem, observed.keep.total_seconds, outside)
        return outside

    def _draft(
        self, geometry: Geometry, modes: Mapping[str, str], micro_seconds: float, peak: int, *, fits: bool, traced: bool
    ) -> Candidate:
        rank = self._window(geometry, micro_seconds)
        return Candidate(
            geometry=geometry, modes=modes, seconds=rank * self.slower if self.traced_job.knows_rates else None,
            rank=rank, peak=peak, fits=fits, traced=traced, micro_seconds=micro_seconds,
        )  # fmt: skip

    def _slower(self, window: ProbedWindow) -> float:
        traced = self.traced_job.trace(window.shape, window.checkpointing, accumulated=window.micro_batches > 1)
        estimate = self.traced_job.total_seconds(traced) * window.micro_batches + self.step_seconds
        return window.seconds / estimate if estimate else 1.0

    def _window(self, geometry: Geometry, micro_seconds: float) -> float:
        longest = max(sum(rank) for rank in geometry.micro_batches)
        computed = micro_seconds * longest / geometry.micro_batch
        count = len(geometry.micro_batches[0])
        stages = self.pipeline.waits(count, micro_seconds, self.sent_bytes(geometry))
        return computed + stages + self.step_seconds + self._communicates(count, computed)

    def sent_bytes(self, geometry: Geometry) -> float:
        """Bytes that a stage of a pipeline sends for one of its micro-batches."""
        return self._sent * geometry.micro_batch


def unlimited(device: Device) -> Device:
    """The device with memory without end."""
    return replace(device, usable_bytes=1 << 60)
