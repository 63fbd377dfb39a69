"""Seconds and bytes of a pipeline's stages, by sums over their modules, and the cut that takes least time and fits.

A stage's peak is modelled as the state of its modules, what they keep for the micro-batches that are on their way, and
the rest: what a traced peak takes more than that, or what a process holds outside of tensors where none was traced.
With p stages, stage s of 1F1B has min(p - s, m) of m micro-batches on their way; GPipe, which runs where m < p, all m.
Of schedules with two stages on each rank, torch's own order says how many (``memfit.planner.timing.interleaved_time``).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import numpy as np

from memfit.engine.pipeline_cut import STAGES_OF_RANK
from memfit.engine.stage_bounds import best_bounds
from memfit.planner.pipeline.module_costs import ModuleCosts
from memfit.planner.pipeline.stage_figures import StageFigures
from memfit.planner.timing.interleaved_time import most_on_their_way


@dataclass(frozen=True, kw_only=True, eq=False)
class StageModel:
    """Stages of one micro-batch's size.

    Attributes:
        paths: of the modules, in their order.
        allowed: whether the modules from one number to before another may be a stage.
        schedule: which ``STAGES_OF_RANK`` names; stage s is on rank s modulo the ranks.
        shards: ranks that share a stage.
        rest: bytes of each stage beside state and what is kept.
    """

    paths: Sequence[str]
    costs: ModuleCosts
    stages: int
    allowed: Callable[[int, int], bool]
    schedule: str = "1f1b"
    shards: int = 1
    rest: Sequence[float] = ()

    @property
    def ranks(self) -> int:
        """Ranks of the pipeline."""
        return self.stages // STAGES_OF_RANK[self.schedule]

    def figures(self, bounds: Sequence[int]) -> tuple[StageFigures, ...]:
        """Modules and seconds of each stage."""
        forward, backward = _sums(self.costs.forward_seconds), _sums(self.costs.backward_seconds)
        return tuple(
            StageFigures(
                first_module=self.paths[begin], last_module=self.paths[end - 1], modules=end - begin,
                forward_seconds=forward[end] - forward[begin] + self.costs.common_seconds,
                backward_seconds=backward[end] - backward[begin],
            )
            for begin, end in pairwise(bounds)
        )  # fmt: skip

    def bytes_of(self, stage: int, begin: int, end: int, micro_batches: int) -> float:
        """Bytes of a stage with these modules, without its rest."""
        state, kept = _sums(self.costs.state.held(self.shards)), _sums(self.costs.kept_bytes)
        times = on_their_way(self.schedule, self.stages, micro_batches)
        return state[end] - state[begin] + times[stage] * (kept[end] - kept[begin])

    def bounds(self, micro_batches: int, budget: float | None = None) -> tuple[int, ...]:
        """The cut whose slowest stage takes the least time of those that fit; where none does, the one that exceeds
        the budget least. Stages of one rank each have an equal part of the budget.

        Args:
            budget: bytes of each rank; None: memory does not matter.
        """
        each = None if budget is None else budget / STAGES_OF_RANK[self.schedule]
        seconds = _sums(self.costs.forward_seconds + self.costs.backward_seconds)
        state, kept = _sums(self.costs.state.held(self.shards)), _sums(self.costs.kept_bytes)
        times = on_their_way(self.schedule, self.stages, micro_batches)
        rest = self._rest

        def cost(stage: int, begin: int, end: int) -> tuple[float, ...]:
            nbytes = state[end] - state[begin] + times[stage] * (kept[end] - kept[begin]) + rest[stage]
            over = 0.0 if each is None else max(nbytes - each, 0.0)
            return over, seconds[end] - seconds[begin], nbytes

        def allowed_cost(stage: int, begin: int, end: int) -> tuple[float, ...] | None:
            return cost(stage, begin, end) if self.allowed(begin, end) else None

        best = best_bounds(len(self.paths), self.stages, allowed_cost) or best_bounds(
            len(self.paths), self.stages, cost
        )
        assert best is not None
        return best

    def peak(self, bounds: Sequence[int], micro_batches: int) -> float:
        """Bytes of the rank that needs most."""
        stages = [
            self.bytes_of(stage, begin, end, micro_batches) + rest
            for stage, ((begin, end), rest) in enumerate(zip(pairwise(bounds), self._rest, strict=True))
        ]
        return max(sum(stages[rank :: self.ranks]) for rank in range(self.ranks))

    @property
    def _rest(self) -> Sequence[float]:
        return self.rest or [0.0] * self.stages


def on_their_way(schedule: str, stages: int, micro_batches: int) -> tuple[int, ...]:
    """Of each stage, micro-batches whose backward has not run yet, at most."""
    if STAGES_OF_RANK[schedule] > 1:
        return most_on_their_way(schedule, stages // STAGES_OF_RANK[schedule], micro_batches)
    if schedule == "gpipe" or micro_batches < stages:
        return (micro_batches,) * stages
    return tuple(stages - stage for stage in range(stages))


def _sums(values: np.ndarray) -> list[float]:
    return list(accumulate(values.tolist(), initial=0.0))
