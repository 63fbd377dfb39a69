"""The device that a plan runs on, in the process that runs it."""

from __future__ import annotations

import torch

from memfit.engine.torchrun_env import torchrun_env
from memfit.errors import InputError
from memfit.plan import Plan


def device_of_plan(plan: Plan) -> torch.device:
    """The device of this machine that a plan runs on, its memory limited to the plan's budget.

    Raises:
        InputError: the plan is for a device that is not here.
    """
    place = torchrun_env()
    if plan.device == "cpu":
        return torch.device("cpu")
    local = place.local_rank if place is not None else 0
    if torch.cuda.device_count() <= local:
        raise InputError(
            f"plan for {plan.device}",
            f"this machine has {torch.cuda.device_count() or 'no'} CUDA devices, and rank {local} of it needs its own",
            "plan again with --device cpu or --memory SIZE",
        )
    torch.cuda.set_device(local)
    torch.cuda.set_per_process_memory_fraction(
        min(plan.budget_bytes / torch.cuda.get_device_properties(local).total_memory, 1.0)
    )
    return torch.device("cuda", local)
