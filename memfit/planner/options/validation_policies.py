"""Room for validation: policies in the order of what they cost, from freeing gradients to leaving it out."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from memfit.job import Job, Shape
from memfit.plan import PhasePolicy

ACCUMULATION = "accumulation"
SMALLER, ASIDE, SKIP = "smaller validation batch", "optimizer state aside in validation", "skip validation"
"""Names of levers."""


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


PRECISION = "precision in validation"
"""A lever's name: products in single precision without autocast, or in half precision with it."""


def beyond(
    job: Job, policy: PhasePolicy, items: int, resized: Shape | None
) -> dict[str, PhasePolicy | tuple[PhasePolicy, Shape]]:
    """By lever that a policy leaves and whose bytes only a trace knows: the policy with that one too.

    The one that code may refuse comes last.

    Args:
        items: of a training micro-batch.
        resized: the micro-batch if more or less were accumulated.
    """
    if not job.validates or policy.where != "here" or policy.optimizer == "aside":
        return {}
    taken = words(policy, job.validation_levers)
    found: dict[str, PhasePolicy | tuple[PhasePolicy, Shape]] = {
        name: replace(policy, settings={**policy.settings, **more})
        for name, more in job.validation_levers.items()
        if name not in taken
    }
    if can_be_smaller(job) and policy.items is None:
        found |= {SMALLER: replace(policy, items=1)} if items > 1 else {}
        found |= {ACCUMULATION: (policy, resized)} if resized is not None else {}
    return found | {PRECISION: replace(policy, settings={**policy.settings, "precision": other_precision(job)})}


def other_precision(job: Job) -> str:
    """What the job's lever of precision would change it to."""
    return "bf16" if job.precision == "fp32" else "fp32"


def can_be_smaller(job: Job) -> bool:
    """Whether a smaller batch is a choice: the job's validation looks at the shape."""
    return type(job).validation_batch is Job.validation_batch


def words(policy: PhasePolicy, job_levers: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """A policy's levers by name."""
    found = ["free gradients"] if policy.gradients == "free" else []
    found += [name for name, more in job_levers.items() if more.items() <= policy.settings.items()]
    if policy.items is not None:
        found.append(SMALLER)
    if policy.optimizer == "aside":
        found.append(ASIDE)
    if policy.where == "skip":
        found.append(SKIP)
    return found
