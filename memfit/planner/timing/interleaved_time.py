"""Seconds of a window, and micro-batches on their way, where each rank of a pipeline holds two stages.

The order of a rank's steps is that of torch's own schedule (``ScheduleInterleaved1F1B``,
``ScheduleInterleavedZeroBubble``). A step runs when the one before it on its rank has ended and what it takes from
another stage has come. Sends run beside what is computed, as in torch's runtime of these schedules. Of a backward in
two parts, that of inputs and that of weights each take half: the products of both are as large.

Left out: sends that share a link, and work that torch repeats to divide a backward. Compared with no run on cards.
"""

from __future__ import annotations

from collections.abc import Sequence

from memfit.torch_compat.pipelining import StageStep, in_schedules, steps_of_ranks

ROUNDS = 4
"""Times the ranks: micro-batches of which each is followed. Each further one takes as long as the slowest rank."""


def interleaved_seconds(
    name: str, forward: Sequence[float], backward: Sequence[float], ranks: int, micro_batches: int, send: float = 0.0
) -> float:
    """Seconds until the last backward has ended.

    Args:
        name: of the schedule.
        forward, backward: of one micro-batch on each stage; stage s is on rank s modulo ``ranks``.
        send: seconds of one send between two ranks.
    """
    slowest = max(sum(forward[rank::ranks]) + sum(backward[rank::ranks]) for rank in range(ranks))
    seconds = 0.0
    for count in in_schedules(name, micro_batches, ranks):
        followed = _followed(count, ranks)
        ended = _last_end(steps_of_ranks(name, ranks, followed), forward, backward, send)
        seconds += ended + (count - followed) * slowest
    return seconds


def most_on_their_way(name: str, ranks: int, micro_batches: int) -> tuple[int, ...]:
    """Of each stage, micro-batches whose backward has not run to its end yet, at most."""
    most = [0] * (2 * ranks)
    for count in in_schedules(name, micro_batches, ranks):
        for steps in steps_of_ranks(name, ranks, _followed(count, ranks)):
            now = dict.fromkeys(range(2 * ranks), 0)
            for step in steps:
                now[step.stage] += {"forward": 1, "inputs": 0}.get(step.kind, -1)
                most[step.stage] = max(most[step.stage], now[step.stage])
    return tuple(most)


def _followed(count: int, ranks: int) -> int:
    return count if count % ranks else min(count, ROUNDS * ranks)


def _last_end(
    ranks: Sequence[Sequence[StageStep]], forward: Sequence[float], backward: Sequence[float], send: float
) -> float:
    """When the last step has ended."""
    ends: dict[tuple[int, bool, int], float] = {}
    """Of a stage's forward, or of its backward of inputs, for a micro-batch."""
    clock, done = [0.0] * len(ranks), [0] * len(ranks)
    while any(done[rank] < len(steps) for rank, steps in enumerate(ranks)):
        before = sum(done)
        for rank, steps in enumerate(ranks):
            for step in steps[done[rank] :]:
                ready = _ready(step, ends, len(forward), send)
                if ready is None:
                    break
                whole = forward[step.stage] if step.kind == "forward" else backward[step.stage]
                clock[rank] = max(clock[rank], ready) + (whole / 2 if step.kind in ("inputs", "weights") else whole)
                if step.kind != "weights":
                    ends[step.stage, step.kind == "forward", step.micro_batch] = clock[rank]
                done[rank] += 1
        assert sum(done) > before, "the stages wait for each other"
    return max(clock)


def _ready(step: StageStep, ends: dict[tuple[int, bool, int], float], stages: int, send: float) -> float | None:
    """When what a step takes from another stage has come; None: not yet."""
    is_forward = step.kind == "forward"
    other = step.stage + (-1 if is_forward else 1)
    if step.kind == "weights" or not 0 <= other < stages:
        return 0.0
    ended = ends.get((other, is_forward, step.micro_batch))
    return None if ended is None else ended + send
