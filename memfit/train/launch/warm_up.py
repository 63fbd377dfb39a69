"""What libraries, thread pools and a job's data take once, taken before a process's memory is limited and measured."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace

import torch
from torch import nn

from memfit.geometry import shape_of
from memfit.job import Job
from memfit.planner.predict import plain_nets
from memfit.trace.step_phases import fetch_synthetic


def warm_up(job: Job, units: int) -> None:
    """Imports what the job's nets and its validation's data need, and starts what torch keeps.

    Args:
        units: of a micro-batch. A job that fails in its validation's data fails in validation too, which says so.
    """
    plain_nets(job)
    if job.validates:
        with suppress(Exception):
            fetch_synthetic(job, replace(shape_of(job, units), items=1), torch.device("cpu"), validation=True)
    warm_torch()


def warm_torch() -> None:
    """Thread pools, kernels and autograd's engine."""
    net = nn.Sequential(nn.Conv1d(4, 64, 3, padding=1), nn.GELU(), nn.Conv1d(64, 4, 3, padding=1), nn.Linear(512, 512))
    optimizer = torch.optim.AdamW(net.parameters())
    for _ in range(2):
        net(torch.randn(64, 4, 512)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
