"""Drafts: ways to run one window, over micro-batches and selections, measured where that is worth it.

One micro-batch's shape is traced under every uniform choice (``fitting``). For another micro-batch the same figures are
taken to grow with it, which ranks the rest; what ranks first is traced itself, until nothing unmeasured ranks first.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from memfit.device.catalogue import Device
from memfit.geometry import Geometry, shape_of, split
from memfit.job import Shape
from memfit.planner.fitting import Fitting, Selection
from memfit.planner.predict import footprint_on
from memfit.planner.selection import Problem, floor, scaled, solve
from memfit.trace.session import MicroTrace

EXPLORED = 3
"""Micro-batches whose selections are traced, at most."""
RANKED = 24
"""Micro-batches that are ranked, at most."""


@dataclass(frozen=True, kw_only=True)
class Draft:
    """One way to run a window."""

    geometry: Geometry
    modes: Mapping[str, str]
    seconds: float | None
    """Of the window; None where the device's rates are not known."""
    rank: float
    """What drafts are compared by: seconds, or work where those are not known."""
    peak: int
    """Process bytes of a micro-batch's forward and backward."""
    fits: bool
    traced: bool
    """Whether these were traced, or follow from another micro-batch."""


class Drafts:
    """The drafts of one job, global batch and device."""

    def __init__(
        self, fitting: Fitting, device: Device, global_batch: int, ranks: int, *,
        fixed: int | None = None, modes: Mapping[str, str] | None = None,
    ) -> None:  # fmt: skip
        """``fixed``: the micro-batch; ``modes``: the checkpointing, where it is not to be chosen."""
        self.fitting, self.device, self.modes = fitting, device, modes
        self.job = fitting.session.rig.job
        self.budget = device.usable_bytes or 0
        share = -(-global_batch // ranks)
        self.geometries = [split(global_batch, m, self.job.unit, ranks) for m in sizes(share, self.job.longest, fixed)]
        self.step_seconds = fitting.step_seconds()
        self.tried: dict[int, Draft] = {}
        self._measured: dict[int, tuple[Problem, float, float]] = {}

    def best(self) -> Draft | None:
        """The draft of the least time among those that fit; ties go to the larger micro-batch."""
        self._measure(self._start())
        for _ in range(EXPLORED):
            best = self._best_tried()
            drafts = [self.estimate(geometry) for geometry in self.geometries if geometry.micro_batch not in self.tried]
            worth = [draft for draft in drafts if draft.fits and (best is None or draft.rank < 0.995 * best.rank)]
            if not worth:
                break
            first = min(worth, key=lambda draft: (draft.rank, -draft.geometry.micro_batch))
            self._measure(first.geometry)
        return self._best_tried() or self._fallback()

    def beside(self, best: Draft) -> list[Draft]:
        """The three next best that fit, each of another micro-batch, and the fastest that recomputes all or nothing."""
        others = [draft for micro, draft in self.tried.items() if micro != best.geometry.micro_batch]
        known = {draft.geometry.micro_batch for draft in (best, *others)}
        others += [self.estimate(g) for g in self.geometries if g.micro_batch not in known]
        return sorted((draft for draft in others if draft.fits), key=lambda draft: draft.rank)[:3]

    def around(self, best: Draft) -> dict[str, int]:
        """Process bytes beside the best draft: everything kept, as little as can be, the whole batch at once."""
        micro = best.geometry.micro_batch
        problem, seconds, outside = self._measured.get(micro) or self._measured[next(iter(self._measured))]
        found = {"chosen": best.peak}
        if micro in self._measured and problem.ways:
            found["keep"] = int(problem.peak([0] * len(problem.ways)) + outside)
            found["floor"] = int(problem.peak(floor(problem)) + outside)
            found["more ms"] = round(1000 * (best.rank - self._window(best.geometry, seconds)))
        found["at once"] = self._at_once(best)
        return found

    def _at_once(self, best: Draft) -> int:
        micro, most = best.geometry.micro_batch, max(sum(rank) for rank in best.geometry.micro_batches)
        problem = (self._measured.get(micro) or self._measured[next(iter(self._measured))])[0]
        return int(problem.resident + (best.peak - problem.resident) * most / micro)

    def estimate(self, geometry: Geometry, budget: int | None = None) -> Draft:
        """What follows for a micro-batch from the nearest that was measured."""
        micro = geometry.micro_batch
        near = min(self._measured, key=lambda one: abs(np.log(one / micro)))
        problem, seconds, outside = self._measured[near]
        factor = micro / near
        other = scaled(problem, factor)
        aim = (self.budget if budget is None else budget) - outside
        choice = solve(other, aim)
        fits = choice is not None
        if choice is None:
            choice = floor(other)
        rank = self._window(geometry, seconds * factor + other.seconds(choice))
        return Draft(
            geometry=geometry, modes=other.modes(choice), seconds=rank if self._knows else None, rank=rank,
            peak=int(other.peak(choice) + outside), fits=fits, traced=False,
        )  # fmt: skip

    def peak_of(self, found: MicroTrace) -> int:
        """Process bytes of a traced micro-batch, the high end of their interval, where nothing is given back for it."""
        return footprint_on(found.trace, unlimited(self.device)).phases["train"].process_bytes_high

    @property
    def _knows(self) -> bool:
        return self.fitting.knows_rates

    def _best_tried(self) -> Draft | None:
        fitting = [draft for draft in self.tried.values() if draft.fits]
        return min(fitting, key=lambda draft: (draft.rank, -draft.geometry.micro_batch)) if fitting else None

    def _fallback(self) -> Draft | None:
        """Smaller micro-batches, until one fits; where none does, the smallest is left among the tried."""
        for geometry in self.geometries:
            if geometry.micro_batch < min(self.tried) and geometry.micro_batch <= self._expected():
                self._measure(geometry)
                if self.tried[geometry.micro_batch].fits:
                    return self.tried[geometry.micro_batch]
        last = self.geometries[-1]
        if last.micro_batch not in self.tried:
            self._measure(last)
        return self._best_tried()

    def _expected(self) -> int:
        """The largest micro-batch that should fit by what was measured; the smallest where none should."""
        fitting = [g.micro_batch for g in self.geometries if self.estimate(g).fits]
        return max(fitting, default=self.geometries[-1].micro_batch)

    def _start(self) -> Geometry:
        """The largest micro-batch that should fit as it is, by the smallest's trace and a line."""
        small = self.geometries[-1]
        traced = self.fitting.trace(shape_of(self.job, small.micro_batch), self.modes or {}, accumulated=True)
        base = self.fitting.resident(traced)
        slope = max(self.peak_of(traced) - base, 1) / small.micro_batch
        most = max((self.budget - base) / slope, 0)
        return next((g for g in self.geometries if g.micro_batch <= most), small)

    def _measure(self, geometry: Geometry) -> None:
        micro = geometry.micro_batch
        shape, accumulated = shape_of(self.job, micro), len(geometry.micro_batches[0]) > 1
        if self.modes is not None:
            self._measure_fixed(geometry, shape, accumulated)
            return
        problem = self.fitting.problem(shape, accumulated=accumulated)
        observed = self.fitting.observed(shape, accumulated=accumulated)
        outside = self.peak_of(self.fitting.kept(shape, accumulated=accumulated)) - observed.keep.peak
        self._measured[micro] = (problem, observed.keep.total_seconds, outside)
        chosen = self.fitting.select(shape, self.budget, self.peak_of, accumulated=accumulated, outside=outside)
        fits = chosen is not None
        if chosen is None:
            chosen = self.fitting.lowest(shape, self.peak_of, accumulated=accumulated)
        self._note(geometry, chosen, observed.keep.total_seconds, fits)

    def _measure_fixed(self, geometry: Geometry, shape: Shape, accumulated: bool) -> None:
        assert self.modes is not None
        traced = self.fitting.trace(shape, self.modes, accumulated=accumulated)
        peak, base = self.peak_of(traced), self.fitting.resident(traced)
        seconds = self.fitting.seconds(traced)
        total = float(self.fitting.work(traced).sum() if seconds is None else seconds.sum())
        only = Problem(ways=[], base=np.array([float(peak)]), bytes=[], resident=float(base))
        self._measured[geometry.micro_batch] = (only, total, 0.0)
        chosen = Selection(modes=self.modes, peak=peak, seconds=total, more_seconds=0, traced=1)
        self._note(geometry, chosen, total, peak <= self.budget)

    def _note(self, geometry: Geometry, chosen: Selection, kept_seconds: float, fits: bool) -> None:
        rank = self._window(geometry, kept_seconds + chosen.more_seconds)
        self.tried[geometry.micro_batch] = Draft(
            geometry=geometry, modes=chosen.modes, seconds=rank if self._knows else None, rank=rank, peak=chosen.peak,
            fits=fits, traced=True,
        )  # fmt: skip

    def _window(self, geometry: Geometry, micro_seconds: float) -> float:
        longest = max(sum(rank) for rank in geometry.micro_batches)
        return micro_seconds * longest / geometry.micro_batch + self.step_seconds


def sizes(share: int, longest: int | None, fixed: int | None) -> list[int]:
    """Micro-batches that split a rank's share into as even parts as can be, from all of it to the smallest.

    A micro-batch holds the longest item at least.
    """
    if fixed is not None:
        return [min(fixed, share)]
    smallest = min(longest or 1, share)
    found: list[int] = []
    count = 1
    while True:
        size = max(-(-share // count), smallest)
        if not found or size < found[-1]:
            found.append(size)
        if size == smallest or len(found) >= RANKED:
            return found if found[-1] == smallest else [*found, smallest]
        count = count + 1 if count < RANKED // 2 else -(-count * 5 // 4)


def unlimited(device: Device) -> Device:
    """The device with memory without end."""
    return replace(device, usable_bytes=1 << 60)
