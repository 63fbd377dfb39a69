"""Policies that free memory for validation in the order of their cost, from freeing gradients to skipping it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from memfit.job import Job, Shape
from memfit.plan import PhasePolicy

ACCUMULATION = "accumulation"
SMALLER, ASIDE, SKIP = "smaller validation batch", "optimizer state aside in validation", "skip validation"
"""Names of options."""


def validation_policies(job: Job) -> Iterator[PhasePolicy]:
    """Policies for validation in the order in which the search tries them until one fits."""
    policy = PhasePolicy()
    yield policy
    settings: dict[str, Any] = {}
    for more in job.validation_options.values():
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
"""Name of the option that validates in the other precision: fp32 without autocast, or bf16 with it."""


def other_policies(
    job: Job, policy: PhasePolicy, items: int, resized: Shape | None
) -> dict[str, PhasePolicy | tuple[PhasePolicy, Shape]]:
    """For each option that a policy does not apply and whose bytes need a trace: the policy with that option added.

    The option that the job's code may refuse comes last.

    Args:
        items: items of a training micro-batch.
        resized: the micro-batch with more or less accumulation.
    """
    if not job.validates or policy.where != "here" or policy.optimizer == "aside":
        return {}
    applied = words(policy, job.validation_options)
    policies: dict[str, PhasePolicy | tuple[PhasePolicy, Shape]] = {
        name: replace(policy, settings={**policy.settings, **more})
        for name, more in job.validation_options.items()
        if name not in applied
    }
    if can_be_smaller(job) and policy.items is None:
        policies |= {SMALLER: replace(policy, items=1)} if items > 1 else {}
        policies |= {ACCUMULATION: (policy, resized)} if resized is not None else {}
    return policies | {PRECISION: replace(policy, settings={**policy.settings, "precision": other_precision(job)})}


def other_precision(job: Job) -> str:
    """The precision that the job's precision option would change to."""
    return "bf16" if job.precision == "fp32" else "fp32"


def can_be_smaller(job: Job) -> bool:
    """Whether validation can use a smaller batch: the job's validation batch follows the shape."""
    return type(job).validation_batch is Job.validation_batch


def words(policy: PhasePolicy, job_options: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Names of the options that a policy applies."""
    names = ["free gradients"] if policy.gradients == "free" else []
    names += [name for name, more in job_options.items() if more.items() <= policy.settings.items()]
    if policy.items is not None:
        names.append(SMALLER)
    if policy.optimizer == "aside":
        names.append(ASIDE)
    if policy.where == "skip":
        names.append(SKIP)
    return names
