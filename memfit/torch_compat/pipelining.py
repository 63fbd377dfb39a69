"""torch.distributed.pipelining with micro-batches that are cut already: its public ``step`` cuts a batch itself."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from memfit.errors import InputError
from memfit.torch_compat import disable_current_modes
from memfit.torch_compat.versions import release_number

OLDEST = (2, 13)
"""The first version whose stages take the shapes of what they receive and send, and let go of activations."""


def check_pipelining() -> None:
    """Raises InputError where torch is older than ``OLDEST``."""
    if release_number(torch.__version__) < OLDEST:
        why = "its pipelining infers shapes by a forward of its own, which memfit does not carry"
        raise InputError(f"pp on torch {torch.__version__}", why, "install torch 2.13 or newer, or leave pp out")


def run_schedule(
    name: str,
    module: nn.Module,
    count: int,
    *,
    stage: int,
    stages: int,
    device: torch.device,
    group: dist.ProcessGroup,
    received: torch.Tensor | None,
    sent: torch.Tensor | None,
    trains: bool,
) -> None:
    """Runs one schedule of ``count`` micro-batches on this rank's stage.

    Args:
        name: 1f1b or gpipe; with fewer micro-batches than stages always GPipe, which 1F1B then is.
        module: called with what was received, if anything, and ``number=`` of the micro-batch; gives what is sent, or
            on the last stage the loss.
        received, sent: tensors of the ``meta`` device with the shapes that pass on; None on the first and last stage.
        trains: whether there is a backward; without one, the module is called for its forward alone.
    """
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

    with disable_current_modes():
        loss = torch.empty((), device="meta")
    own: Any = PipelineStage(
        module, stage, stages, device, group=group,
        input_args=() if received is None else (received,), output_args=(loss if sent is None else sent,),
    )  # fmt: skip
    kind: Any = Schedule1F1B if name == "1f1b" and count >= stages and trains else ScheduleGPipe
    schedule = kind(own, count, loss_fn=(lambda output, target: output) if trains else None, scale_grads=False)
    own.has_backward = trains
    numbers = [{"number": number} for number in range(count)]
    schedule._step_microbatches([()] * count, numbers, list(range(count)), return_outputs=False)


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
