"""What questions need of a job beside its traces, read from the job itself."""

from __future__ import annotations

import typing
from collections.abc import Iterator
from typing import Any

from memfit.job import Job
from memfit.planner.job_facts import JobFacts, Policy
from memfit.planner.predict import checkpoint_all, default_checkpointing, net_sizes, plain_nets

LORA_RANK = 16


def facts_of(job: Job) -> JobFacts:
    """The facts of a job.

    Raises:
        InputError: its ``checkpoint`` is neither none nor all.
    """
    nets = plain_nets(job)
    own, every = default_checkpointing(job, nets), checkpoint_all(job, nets)
    types = job.setting_types()
    return JobFacts(
        unit=job.unit, longest=job.longest, precision=job.precision, checkpoint=job.checkpoint, nets=net_sizes(nets),
        own=own, every=every, policies=tuple(_policies(job, own, every)),
        whole_numbers={name: getattr(job, name) for name, kind in types.items() if kind in (int, int | None)},
    )  # fmt: skip


def _policies(job: Job, own: dict[str, str], every: dict[str, str]) -> Iterator[Policy]:
    """Keeping everything, recomputing every block, and settings of the job that need less memory."""
    yield Policy(name="keep everything", checkpointing={}, changes={})
    if every:
        yield Policy(name="recompute everything", checkpointing=every, changes={})
    if own and own != every:
        yield Policy(name="the job's own", checkpointing=own, changes={})
    for setting, value in _smaller_state(job):
        yield Policy(name=f"{setting}={value}", checkpointing={}, changes={setting: value})


def _smaller_state(job: Job) -> Iterator[tuple[str, Any]]:
    """LoRA and 8-bit optimizer state, where the job has a setting for them that is off."""
    for setting, kind in job.setting_types().items():
        now = getattr(job, setting)
        if setting in ("lora", "lora_rank") and not now:
            yield setting, LORA_RANK
        choices = typing.get_args(kind) if typing.get_origin(kind) is typing.Literal else ()
        eight_bit = [choice for choice in choices if "8bit" in str(choice).replace("-", "").replace("_", "")]
        if eight_bit and now not in eight_bit:
            yield setting, eight_bit[0]
