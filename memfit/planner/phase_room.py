"""Room for validation: policies in the order of what they cost, from freeing gradients to leaving it out."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from memfit.job import Job
from memfit.plan import PhasePolicy


def policies(job: Job) -> Iterator[PhasePolicy]:
    """What may be done for validation, the next one each time it does not fit."""
    policy = PhasePolicy()
    yield policy
    settings: dict[str, Any] = {}
    for more in job.validation_levers.values():
        settings |= more
        policy = replace(policy, settings=dict(settings))
        yield policy
    if can_be_smaller(job):
        policy = replace(policy, items=1)
        yield policy
    policy = replace(policy, optimizer="aside")
    yield policy
    yield PhasePolicy(where="skip")


def can_be_smaller(job: Job) -> bool:
    """Whether a smaller batch is a choice: the job's validation looks at the shape."""
    return type(job).validation_batch is Job.validation_batch


def words(policy: PhasePolicy, job_levers: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """A policy's levers by name."""
    found = ["free gradients"] if policy.gradients == "free" else []
    found += [name for name, more in job_levers.items() if more.items() <= policy.settings.items()]
    if policy.items is not None:
        found.append("smaller validation batch")
    if policy.optimizer == "aside":
        found.append("optimizer state aside in validation")
    if policy.where == "skip":
        found.append("skip validation")
    return found
