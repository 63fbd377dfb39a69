"""Seconds of a window of stages that take different times, which send in no time: 1F1B, or GPipe, forward by forward.

A stage runs a micro-batch's forward when the stage before has run it, and its backward when the stage behind has. Stage
s of p runs p - s forwards, then a backward and a forward in turn, and then the backwards that are left, as torch's
``Schedule1F1B``; with fewer micro-batches than stages it runs all forwards first, as ``ScheduleGPipe``.
"""

from __future__ import annotations

from collections.abc import Sequence

ROUNDS = 8
"""Times the stages: micro-batches of which each is followed. From then on the slowest stage never waits, and each
further one takes as long as it."""


def schedule_seconds(
    forward: Sequence[float], backward: Sequence[float], micro_batches: int, *, gpipe: bool = False
) -> float:
    """Seconds until the last backward has ended.

    Args:
        forward, backward: of one micro-batch on each stage.
        gpipe: whether all forwards run first, however many micro-batches there are.
    """
    stages = len(forward)
    followed = min(micro_batches, ROUNDS * stages)
    orders = [_order(stage, stages, followed, gpipe=gpipe) for stage in range(stages)]
    clock, done = [0.0] * stages, [0] * stages
    forwards: list[list[float]] = [[] for _ in range(stages)]
    backwards: list[list[float]] = [[] for _ in range(stages)]
    while any(done[stage] < len(orders[stage]) for stage in range(stages)):
        for stage in range(stages):
            for is_forward in orders[stage][done[stage] :]:
                mine = forwards[stage] if is_forward else backwards[stage]
                if is_forward:
                    given = forwards[stage - 1] if stage else None
                else:
                    given = backwards[stage + 1] if stage < stages - 1 else None
                if given is not None and len(given) <= len(mine):
                    break
                ready = given[len(mine)] if given is not None else 0.0
                clock[stage] = max(clock[stage], ready) + (forward[stage] if is_forward else backward[stage])
                mine.append(clock[stage])
                done[stage] += 1
    slowest = max(forward) + max(backward) if gpipe else max(map(sum, zip(forward, backward, strict=True)))
    return max(clock) + (micro_batches - followed) * slowest


def _order(stage: int, stages: int, micro_batches: int, *, gpipe: bool) -> list[bool]:
    """Whether each step of a stage is a forward."""
    first = micro_batches if gpipe or micro_batches < stages else stages - stage
    return [True] * first + [False, True] * (micro_batches - first) + [False] * first
