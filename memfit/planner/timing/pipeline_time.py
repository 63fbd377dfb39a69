"""Seconds in which the stages of a pipeline wait for each other: for the first and last micro-batch, and for sends.

For p stages that each compute a micro-batch's forward and backward in t seconds, and m micro-batches, a window computes
m t and waits (p - 1) t (Narayanan and others, "Efficient Large-Scale Language Model Training on GPU Clusters Using
Megatron-LM", 2021, section 2.2). Where the stages take different times, t is the slowest one's, and what it waits for
the others follows from the order of the schedule (``memfit.planner.timing.schedule_time``).

A send of B bytes takes s = B / bandwidth + one step of the link. The first micro-batch is sent p - 1 times before the
last stage has it, and its gradient as often on its way back: 2 (p - 1) s. Each further one adds what a stage waits for,
as torch's schedules are written (``torch.distributed.pipelining.schedules``): 1F1B waits for every send, of an
activation and of a gradient, 2 s, and s where there are two stages, of which each sends one of them. GPipe sends beside
the next micro-batch: it adds what of s is longer than the forward, a third of t, and than the backward, two thirds.

Of two stages on each rank the whole window is followed, sends beside what is computed
(``memfit.planner.timing.interleaved_time``).

With more than two stages this is one send more than a simulation of 1F1B gives (``test_pipeline_time.py``).

Left out: links that other dimensions use at the same time. Compared with no run over a network.
"""

from __future__ import annotations

from dataclasses import dataclass

from memfit.device.hardware.cluster import GroupLink
from memfit.engine.pipeline_cut import STAGES_OF_RANK
from memfit.planner.timing.interleaved_time import interleaved_seconds
from memfit.planner.timing.schedule_time import schedule_seconds

FORWARD = 1 / 3
"""Of a micro-batch's computation: its backward does twice its forward's work."""


@dataclass(frozen=True, kw_only=True)
class PipelineTime:
    """Waiting of the stages of a pipeline.

    Attributes:
        stages: ranks of the pipeline, each with one stage or two; of one nothing waits.
        link: what joins them; None: not known, so that sends count nothing.
        shares: of each stage, seconds of a forward and of a backward, as multiples of what the slowest rank takes for
            both; empty: all take as long. Of two stages on each rank they are needed.
        schedule: one of ``STAGES_OF_RANK``.
    """

    stages: int = 1
    link: GroupLink | None = None
    shares: tuple[tuple[float, float], ...] = ()
    schedule: str = "1f1b"

    def send_seconds(self, nbytes: float) -> float:
        """Seconds of one send."""
        if self.link is None:
            return 0.0
        step = self.link.node_step_seconds if self.link.nodes > 1 else self.link.step_seconds
        return nbytes / self.link.bytes + step

    def sent_seconds(self, micro_batches: int, nbytes: float) -> float:
        """Seconds of a window that a stage between others sends, whether it waits for that or not."""
        times = 2 * STAGES_OF_RANK[self.schedule] * micro_batches
        return 0.0 if self.stages == 1 else times * self.send_seconds(nbytes)

    def waits(self, micro_batches: int, micro_seconds: float, nbytes: float) -> float:
        """Seconds of a window that a stage waits for others.

        Args:
            micro_seconds: that the slowest rank computes for a micro-batch, forward and backward.
            nbytes: of the activation that a stage sends for a micro-batch; of its gradient as many.
        """
        if self.stages == 1:
            return 0.0
        send, others, gpipe = self.send_seconds(nbytes), self.stages - 1, self.schedule == "gpipe"
        forward, backward = ([micro_seconds * share[which] for share in self.shares] for which in (0, 1))
        if STAGES_OF_RANK[self.schedule] > 1:
            window = interleaved_seconds(self.schedule, forward, backward, self.stages, micro_batches, send)
            return window - micro_batches * micro_seconds
        if micro_batches >= self.stages and not gpipe:  # torch's 1F1B is GPipe with fewer
            each = send if self.stages == 2 else 2 * send
        else:
            each = max(send - FORWARD * micro_seconds, 0.0) + max(send - (1 - FORWARD) * micro_seconds, 0.0)
        idle = others * micro_seconds
        if self.shares:
            idle = schedule_seconds(forward, backward, micro_batches, gpipe=gpipe) - micro_batches * micro_seconds
        return idle + others * 2 * send + (micro_batches - 1) * each


ONE_STAGE = PipelineTime()
"""Nets that are not cut."""
