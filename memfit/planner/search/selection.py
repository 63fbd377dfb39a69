"""Checkpoint selection: an integer program that chooses a way for each block, at the least time, under a budget.

    minimise  sum over blocks b and ways w of  seconds[b, w] · x[b, w]
    subject to, for each block in each turn's forward and backward,
        own peak[b, x] + sum over other blocks of what is alive of them then  <=  budget
    and for each moment between blocks, the rest + what is alive of all blocks  <=  budget

Solved by HiGHS (Huangfu and Hall, 2018) through scipy. It takes bytes as additive over blocks, which they nearly are:
the choice must be traced and replayed, and the budget corrected by what came out
(``memfit.planner.search.traced_job``).
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import scipy  # which imports its parts when they are first asked for: a plan that keeps everything needs none

from memfit.planner.search.checkpoint_options import CheckpointOption
from memfit.planner.search.layout import Layout
from memfit.planner.search.observation import Observation

UNIT = float(1 << 20)
EXACT = 1e-6
INFEASIBLE = 2
"""The status by which scipy says so."""
TOLERANCE = 1e-5
"""Of the seconds of the slowest way: what a bound may be above by rounding in HiGHS, whose rows hold to 1e-7."""
NODES = 2000
"""Nodes of the search tree, at most: a bound that is the same on every machine, as a time is not."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Problem:
    """Ways by block, and rows of ``base + sum over blocks of bytes[block][row, way] <= budget``."""

    ways: list[list[CheckpointOption]]
    base: np.ndarray
    """float (rows,)."""
    bytes: list[np.ndarray]
    """For each block, an array of float (rows, options)."""
    resident: float = 0.0
    """Bytes of ``base`` that do not grow with the micro-batch."""

    def peak(self, choice: Sequence[int]) -> float:
        """The highest row, in bytes."""
        rows = self.base + sum(part[:, way] for part, way in zip(self.bytes, choice, strict=True))
        return float(rows.max(initial=0))

    def seconds(self, choice: Sequence[int]) -> float:
        """More than keeping everything takes."""
        return sum(ways[way].seconds for ways, way in zip(self.ways, choice, strict=True))

    def modes(self, choice: Sequence[int]) -> dict[str, str]:
        """Mode by module path."""
        return {
            path: mode for ways, way in zip(self.ways, choice, strict=True) for path, mode in ways[way].modes.items()
        }


def problem_of(layout: Layout, keep: Observation, ways: list[list[CheckpointOption]]) -> Problem:
    """The rows of every moment that may be the highest: own peaks of blocks, and moments between them."""
    turns, _, blocks = keep.block_peak.shape
    own = [
        (turn, index, block)
        for turn in range(turns)
        for index in range(2)
        for block in range(blocks)
        if keep.block_peak[turn, index, block]
    ]
    rests = [keep.resident] * len(own) + [place.rest for place in keep.gaps]
    turn_of = np.array([turn for turn, _, _ in own] + [place.turn for place in keep.gaps])
    alive = np.stack([keep.block_alive[place] for place in own] + [place.alive for place in keep.gaps])
    parts = []
    for block, some in enumerate(ways):
        units = np.flatnonzero(layout.block_of == block)
        kept = np.stack([way.kept for way in some])
        part = np.einsum("ru,wru->rw", alive[:, units], kept[:, turn_of])
        for row, (turn, index, at) in enumerate(own):
            if at == block:
                part[row] = [way.peak[turn, index] - keep.resident for way in some]
        parts.append(part)
    return _without_idle_rows(Problem(ways=ways, base=np.array(rests), bytes=parts, resident=keep.resident))


def scaled(problem: Problem, factor: float, slower: float, fixed: float = 0.0) -> Problem:
    """The problem of a micro-batch with so many times the bytes, and so many times the seconds.

    Args:
        fixed: bytes beyond the resident ones that do not grow with it, such as a weight's gradient before it is added.
    """
    ways = [[replace(way, seconds=way.seconds * slower) for way in some] for some in problem.ways]
    stays = problem.resident + fixed
    base = stays + (problem.base - stays) * factor
    return replace(problem, ways=ways, base=base, bytes=[part * factor for part in problem.bytes])


def solve(problem: Problem, budget: float, *, gap: float = EXACT) -> list[int] | None:
    """The fastest choice whose rows are all within the budget; None where there is none.

    Args:
        gap: how near the least seconds are looked for, as a part of them.
    """
    counts = [len(ways) for ways in problem.ways]
    if not counts:
        return [] if problem.base.max(initial=0) <= budget else None
    if (problem.base > budget).any():
        return None
    seconds, matrix = _seconds(problem), np.hstack(problem.bytes)
    spare = matrix.max(axis=0) / max(matrix.max(), 1e-12 * UNIT)
    solution = _quiet_milp(
        seconds / _scale(seconds) + 1e-7 * spare,
        constraints=_limits(problem, budget),
        integrality=np.ones(len(seconds)),
        bounds=scipy.optimize.Bounds(0, 1),
        options={"node_limit": NODES, "mip_rel_gap": gap},
    )
    return None if solution.x is None else _chosen(solution.x, counts)


def least_seconds(problem: Problem, budget: float) -> float:
    """Seconds that no choice within the budget is below: what blocks in parts would take, by linear programming.

    It takes a twentieth of the time of ``solve``. Infinite where not even parts fit.
    """
    if (problem.base > budget).any():
        return np.inf
    if not problem.ways:
        return 0.0
    seconds = _seconds(problem)
    solution = _quiet_milp(
        seconds / _scale(seconds), constraints=_limits(problem, budget), bounds=scipy.optimize.Bounds(0, 1)
    )
    if solution.status == INFEASIBLE:
        return np.inf
    return 0.0 if solution.x is None else float(seconds @ solution.x) - TOLERANCE * float(seconds.max())


def floor(problem: Problem) -> list[int]:
    """The choice whose highest row is lowest."""
    counts = [len(ways) for ways in problem.ways]
    if not counts:
        return []
    matrix = np.hstack(problem.bytes) / UNIT
    highest = np.full((len(matrix), 1), -1.0)
    solution = _quiet_milp(
        np.concatenate([np.zeros(sum(counts)), [1.0]]),
        constraints=[
            scipy.optimize.LinearConstraint(
                scipy.sparse.csr_matrix(np.hstack([_one_each(counts).toarray(), np.zeros((len(counts), 1))])), 1, 1
            ),
            scipy.optimize.LinearConstraint(
                scipy.sparse.csr_matrix(np.hstack([matrix, highest])), -np.inf, -problem.base / UNIT
            ),
        ],
        integrality=np.concatenate([np.ones(sum(counts)), [0.0]]),
        bounds=scipy.optimize.Bounds(0, np.concatenate([np.ones(sum(counts)), [np.inf]])),
        options={"node_limit": NODES, "mip_rel_gap": EXACT},
    )
    return _chosen(solution.x[:-1], counts)


def _quiet_milp(*args: Any, **kwargs: Any) -> Any:
    """``milp``, without the lines that HiGHS's library writes to standard output whatever its options say."""
    sys.stdout.flush()
    try:
        kept = os.dup(1)
    except OSError:
        return scipy.optimize.milp(*args, **kwargs)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, 1)
        return scipy.optimize.milp(*args, **kwargs)
    finally:
        os.dup2(kept, 1)
        os.close(kept)
        os.close(nowhere)


def _seconds(problem: Problem) -> np.ndarray:
    return np.array([way.seconds for ways in problem.ways for way in ways])


def _scale(seconds: np.ndarray) -> float:
    return max(float(seconds.max()), 1e-12)


def _limits(problem: Problem, budget: float) -> list[scipy.optimize.LinearConstraint]:
    """One way for each block, and the rows that some choice is above."""
    limits = [scipy.optimize.LinearConstraint(_one_each([len(ways) for ways in problem.ways]), 1, 1)]
    binding = sum(part.max(axis=1) for part in problem.bytes) > budget - problem.base
    if binding.any():
        matrix, above = np.hstack(problem.bytes) / UNIT, (budget - problem.base) / UNIT
        limits.append(
            scipy.optimize.LinearConstraint(scipy.sparse.csr_matrix(matrix[binding]), -np.inf, above[binding])
        )
    return limits


def _one_each(counts: Sequence[int]) -> scipy.sparse.csr_matrix:
    rows = np.repeat(np.arange(len(counts)), counts)
    return scipy.sparse.csr_matrix((np.ones(len(rows)), (rows, np.arange(len(rows)))))


def _chosen(x: np.ndarray, counts: Sequence[int]) -> list[int]:
    stops = np.cumsum(counts)
    return [int(np.argmax(part)) for part in np.split(x, stops[:-1])]


def _without_idle_rows(problem: Problem) -> Problem:
    """Leaves out rows that another row is never below."""
    matrix = np.hstack([problem.base[:, None], *problem.bytes])
    order = np.argsort(-matrix.sum(1), kind="stable")
    left: list[int] = []
    for row in order:
        if not any((matrix[other] >= matrix[row]).all() for other in left):
            left.append(int(row))
    return replace(problem, base=problem.base[left], bytes=[part[left] for part in problem.bytes])
