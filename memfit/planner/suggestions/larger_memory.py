"""What more memory would bring: the least of it that makes a window noticeably faster."""

from __future__ import annotations

from dataclasses import dataclass

from memfit.planner.search.candidate_search import Candidate, CandidateSearch

NOTICED = 0.03
"""The share of a window's time that counts as noticeable."""
STEPS = (1.02, 1.05, 1.1, 1.2, 1.35, 1.5, 2.0, 3.0)
"""Budgets that are tried, over the present one."""


@dataclass(frozen=True, kw_only=True)
class LargerMemory:
    """So many bytes more would save this part of a window's time. An estimate, scaled from what was traced."""

    more_bytes: int
    saves: float
    micro_batch: int


def next_step(search: CandidateSearch, best: Candidate) -> LargerMemory | None:
    """The nearest budget at which a window is faster; None where no memory would make it so."""
    if search.modes is not None or not best.rank:
        return None
    near = sorted(search.geometries, key=lambda g: abs(g.micro_batch - best.geometry.micro_batch))[:4]
    near = [geometry for geometry in near if search.least(geometry) < (1 - NOTICED) * best.rank]
    for factor in STEPS:
        budget = int(search.budget * factor)
        faster = (geometry for geometry in near if search.bound(geometry, budget) < (1 - NOTICED) * best.rank)
        first = next(search.ranked(faster, budget), None)
        if first is not None and first.rank < (1 - NOTICED) * best.rank:
            needs = max(first.peak - search.budget, 1)
            saves = 1 - first.rank / best.rank
            return LargerMemory(more_bytes=needs, saves=saves, micro_batch=first.geometry.micro_batch)
    return None
