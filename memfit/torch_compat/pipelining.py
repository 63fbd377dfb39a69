"""torch.distributed.pipelining with micro-batches that are cut already: stages get none, and count their calls."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from memfit.errors import InputError
from memfit.installation import release_number
from memfit.torch_compat import disable_current_modes

OLDEST = (2, 13)
"""The first version whose stages take the shapes of what they receive and send, and let go of activations."""


def check_pipelining() -> None:
    """Raises InputError where torch is older than ``OLDEST``, or lacks what memfit replaces in its pipelining."""
    if release_number(torch.__version__) < OLDEST:
        why = "its pipelining infers shapes by a forward of its own, which memfit does not carry"
        raise InputError(f"pp on torch {torch.__version__}", why, "install torch 2.13 or newer, or leave pp out")
    from torch.distributed.pipelining import PipelineStage

    for owner, name in ((schedule_class(), WARM_UP), (PipelineStage, _CLEAN_UP)):
        if not hasattr(owner, name):
            why = f"its {owner.__name__} has no {name}, which memfit replaces"
            raise InputError(f"pp on torch {torch.__version__}", why, "install torch 2.13, or leave pp out")


INTERLEAVED, ZERO_BUBBLE = "interleaved_1f1b", "interleaved_zero_bubble"
"""Schedules of several stages on each rank."""
_CLEAN_UP = "_post_metadata_inference_cleanup"
"""Method of a stage before its first micro-batch: drops what a forward and backward that told it the shapes has left,
and with it the gradients of sharded modules that an earlier schedule of the window has made. The shapes are given."""


@dataclass(frozen=True, kw_only=True)
class ScheduledStage:
    """A stage of this rank, as a schedule runs it.

    Attributes:
        module: called with what was received, if anything, for one micro-batch after the other; gives what is sent,
            or on the last stage the loss. Where it is under ``fully_shard``, the schedule scatters its gradients.
        number: the stage's.
        received, sent: tensors of the ``meta`` device with the shapes that pass on; None on the first and last stage.
    """

    module: nn.Module
    number: int
    received: torch.Tensor | None
    sent: torch.Tensor | None


def run_schedule(
    name: str,
    stages: Sequence[ScheduledStage],
    count: int,
    *,
    ranks: int,
    device: torch.device,
    group: dist.ProcessGroup,
    trains: bool,
) -> None:
    """Runs one schedule of ``count`` micro-batches on the stages of this rank.

    Args:
        name: 1f1b, gpipe, ``INTERLEAVED`` or ``ZERO_BUBBLE``; of one stage on each rank, with fewer micro-batches than
            ranks always GPipe, which 1F1B then is.
        count: of several stages on each rank as ``in_schedules`` divides them.
        ranks: of the pipeline.
        trains: whether there is a backward; without one, the modules are called for their forward alone.
    """
    from torch.distributed import pipelining

    with disable_current_modes():
        loss = torch.empty((), device="meta")
    own: list[Any] = [
        pipelining.PipelineStage(
            stage.module, stage.number, ranks * len(stages), device, group=group,
            input_args=() if stage.received is None else (stage.received,),
            output_args=(loss if stage.sent is None else stage.sent,),
        )
        for stage in stages
    ]  # fmt: skip
    loss_of = (lambda output, target: output) if trains else None
    if name in (INTERLEAVED, ZERO_BUBBLE):
        several: Any = pipelining.ScheduleInterleaved1F1B
        if name == ZERO_BUBBLE and trains:  # without a backward there is none of weights either
            several = pipelining.ScheduleInterleavedZeroBubble
        schedule: Any = several(own, count, loss_fn=loss_of, scale_grads=False)
    else:
        (only,) = own
        kind = pipelining.Schedule1F1B if name == "1f1b" and count >= ranks and trains else pipelining.ScheduleGPipe
        schedule = kind(only, count, loss_fn=loss_of, scale_grads=False)
    for stage in own:
        setattr(stage, _CLEAN_UP, lambda: None)
    targets = torch.zeros(count, device="cpu") if trains else None  # one for each micro-batch, which no loss reads
    with _silent_schedules():
        schedule.step(target=targets, return_outputs=False)


def in_schedules(name: str, count: int, ranks: int) -> tuple[int, ...]:
    """So many micro-batches, as schedules take them one after the other: all at once, but for several stages on each
    rank, through which as many pass in each round."""
    if name not in (INTERLEAVED, ZERO_BUBBLE) or count < 2 * ranks or count % ranks == 0:
        return (count,)
    return (count - count % ranks, count % ranks)


@dataclass(frozen=True, kw_only=True)
class StageStep:
    """What a rank of a schedule computes next.

    Attributes:
        stage: whose.
        kind: forward, backward, or of a backward in two parts inputs and weights.
        micro_batch: number of the micro-batch.
    """

    stage: int
    kind: str
    micro_batch: int


_STEP_KINDS = {
    "FORWARD": "forward", "FULL_BACKWARD": "backward", "BACKWARD_INPUT": "inputs", "BACKWARD_WEIGHT": "weights",
}  # fmt: skip


@lru_cache(maxsize=64)
def steps_of_ranks(name: str, ranks: int, count: int) -> tuple[tuple[StageStep, ...], ...]:
    """The steps of each rank in order, as torch's own schedule has them.

    Args:
        name: ``INTERLEAVED`` or ``ZERO_BUBBLE``, of two stages on each rank.
        count: micro-batches, as ``in_schedules`` divides them.
    """
    from torch.distributed import pipelining

    kind: Any = pipelining.ScheduleInterleaved1F1B if name == INTERLEAVED else pipelining.ScheduleInterleavedZeroBubble
    stages = [
        SimpleNamespace(
            group_size=ranks, group_rank=0, num_stages=2 * ranks, stage_index=stage, is_first=stage == 0, is_last=False,
            submod=nn.Identity(),
        )
        for stage in (0, ranks)
    ]  # fmt: skip
    order = kind(stages, count, loss_fn=lambda output, target: output, scale_grads=False).pipeline_order
    return tuple(
        tuple(
            StageStep(
                stage=step.stage_index, kind=_STEP_KINDS[step.computation_type.name],
                micro_batch=step.microbatch_index,
            )
            for step in order[rank] if step is not None
        )
        for rank in range(ranks)
    )  # fmt: skip


@contextmanager
def _silent_schedules() -> Iterator[None]:
    """Where an action fails, torch writes the whole schedule, beside the error that it raises."""
    logger = logging.getLogger("torch.distributed.pipelining.schedules")
    before = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(before)


WARM_UP = "_warmup_p2p"
"""For patches of ``schedule_class``: what sends a number to neighbours before the first micro-batch."""


def schedule_class() -> Any:
    """The class of all schedules."""
    from torch.distributed.pipelining import schedules

    return schedules._PipelineSchedule


def know_shapes(schedule: Any, stages: Any, *args: Any) -> None:
    """In the place of ``WARM_UP``: all shapes are known."""
    from torch.distributed.pipelining.stage import InferenceMode

    for stage in stages:
        stage._inference_mode = InferenceMode.STATIC


SEND, RECEIVE = "_send_meta", "_recv_meta"
"""For patches of PipelineStage: a stage tells a stage of another rank the shapes of the tensors that it sends to it."""


def ask_for_shapes(schedule: Any, stages: Sequence[Any], has_backward: bool) -> None:
    """In the place of ``WARM_UP``: stages that were not given their shapes run a forward and backward for them."""
    from torch.distributed.pipelining.stage import InferenceMode

    asks = any(InferenceMode.needs_dynamic(stage._user_meta, has_backward) for stage in stages)
    for stage in stages:
        stage._inference_mode = InferenceMode.DYNAMIC if asks else InferenceMode.STATIC


def stages_of(schedule: Any) -> list[Any]:
    """The stages of a schedule's rank."""
    return list(schedule._stages) if hasattr(schedule, "_stages") else [schedule._stage]


def send_all(stage: Any) -> None:
    """Lets a stage send what it tells its neighbours also to those of its own rank, and receive theirs."""
    stage._is_same_rank = lambda other: False


def run_forward_for_shapes(stage: Any, args: Any, kwargs: Any, has_backward: bool) -> None:
    """Runs a stage's forward for the shapes of what it sends, which it then tells the next stage."""
    stage._forward_metadata_inference(args, kwargs, has_backward)


def run_backward_for_shapes(schedule: Any, stage: Any, target: Any, loss_kwargs: Any) -> None:
    """Runs the backward after ``run_forward_for_shapes``, and tells the stage before the shapes of its gradients."""
    stage._backward_metadata_inference(loss_fn=schedule._loss_fn, target=target, loss_kwargs=loss_kwargs)
