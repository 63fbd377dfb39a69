"""The largest micro-batch, sequence or setting that fits: sizes are predicted until one fits and the next does not.

Peaks grow nearly in proportion to the size, so that a line through two predictions leads close to the limit; every
candidate is then predicted itself, exactly as ``memfit predict`` does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from memfit.apply.phase_memory import with_settings
from memfit.device.hardware.catalogue import Device
from memfit.errors import InputError
from memfit.geometry import MOST
from memfit.job import Job, Shape
from memfit.planner.predict import checkpoint_all, default_checkpointing, plain_nets
from memfit.planner.prediction import Prediction
from memfit.planner.traced_questions import TracedQuestions

QUESTIONS = 40
"""Predictions for one answer, at most."""
SECANT = 8
"""Predictions after which every second one halves what is left."""
LORA_RANK = 16


@dataclass(frozen=True, kw_only=True)
class Policy:
    """A way to run a job: its settings, and what it recomputes."""

    name: str
    job: Job
    checkpointing: Mapping[str, str]
    changes: Mapping[str, Any]
    """Settings that differ from the job's."""


@dataclass(frozen=True, kw_only=True)
class Largest:
    """The largest size that fits a device under a policy, and its prediction; None where not even the smallest fits."""

    device: Device
    policy: Policy
    size: int | None
    """Items, units of length, or the setting's value."""
    prediction: Prediction | None
    exact: bool
    """Whether the next size was predicted and does not fit."""


def policies(job: Job) -> Iterator[Policy]:
    """Keeping everything, recomputing every block, and settings of the job that need less memory."""
    nets = plain_nets(job)
    own, every = default_checkpointing(job, nets), checkpoint_all(job, nets)
    yield Policy(name="keep everything", job=job, checkpointing={}, changes={})
    if every:
        yield Policy(name="recompute everything", job=job, checkpointing=every, changes={})
    if own and own != every:
        yield Policy(name="the job's own", job=job, checkpointing=own, changes={})
    for setting, value in _smaller_state(job):
        other = with_settings(job, {setting: value})
        yield Policy(name=f"{setting}={value}", job=other, checkpointing={}, changes={setting: value})


def largest_of(
    policy: Policy, name: str, device: Device, questions: TracedQuestions, vary: Callable[[Job, int], tuple[Job, Shape]]
) -> Largest:
    """The largest size that fits.

    Args:
        vary: (the job, its micro-batch) of a size.
    """
    predictions: dict[int, Prediction] = {}

    def needs(size: int) -> int:
        job, shape = vary(policy.job, size)
        predictions[size] = questions.predict(job, name, shape, device, checkpointing=policy.checkpointing)
        footprint = predictions[size].footprint
        need = max(phase.process_bytes for phase in footprint.phases.values())
        return need if footprint.fits else max(need, (device.usable_bytes or 0) + 1)

    size, exact = largest_size(needs, device.usable_bytes or 0)
    prediction = predictions[size] if size is not None else None
    return Largest(device=device, policy=policy, size=size, prediction=prediction, exact=exact)


def largest_size(needs: Callable[[int], int], limit: int) -> tuple[int | None, bool]:
    """(the largest size whose need is within a limit, whether the next one's is known to exceed it).

    Args:
        needs: bytes of a size from 1 on; near enough to growing with it.
    """
    known = {1: needs(1)}
    if known[1] > limit:
        return None, True
    low, high = 1, MOST + 1
    while high - low > 1 and len(known) < QUESTIONS:
        size = _next_size(known, low, high, limit)
        known[size] = needs(size)
        if known[size] <= limit:
            low = max(low, size)
        else:
            high = min(high, size)
    return low, high - low == 1 and high in known


def _next_size(known: Mapping[int, int], low: int, high: int, limit: int) -> int:
    """The next micro-batch to try: on the line through the two known sizes next to the limit, or halfway between
    them."""
    if len(known) == 1:
        return 2
    if len(known) > SECANT and len(known) % 2:
        return (low + high) // 2 if high <= MOST else min(2 * low, MOST)
    other = high if high in known else max(size for size in known if size < low)
    slope = (known[other] - known[low]) / (other - low)
    if slope <= 0:
        return min(2 * low, high - 1)
    return int(min(max(low + (limit - known[low]) / slope, low + 1), high - 1, 64 * low + 64))


def by_items(length: int | None) -> Callable[[Job, int], tuple[Job, Shape]]:
    """Sizes are items of this length (None: samples have no length)."""
    return lambda job, size: (job, Shape(items=size, length=length))


def by_length(items: int) -> Callable[[Job, int], tuple[Job, Shape]]:
    """Sizes are the length of so many items."""
    return lambda job, size: (job, Shape(items=items, length=size))


def by_setting(job: Job, setting: str, shape: Shape) -> Callable[[Job, int], tuple[Job, Shape]]:
    """Sizes are a whole-number setting's values.

    Raises:
        InputError: the job has no such setting.
    """
    types = job.setting_types()
    if types.get(setting) not in (int, int | None):
        numbers = ", ".join(name for name, kind in types.items() if kind in (int, int | None))
        raise InputError(f"--vary {setting}", "no whole-number setting of the job", f"write one of {numbers}")
    return lambda varied, size: (with_settings(varied, {setting: size}), shape)


def _smaller_state(job: Job) -> Iterator[tuple[str, Any]]:
    """LoRA and 8-bit optimizer state, where the job has a setting for them that is off."""
    import typing

    for setting, kind in job.setting_types().items():
        now = getattr(job, setting)
        if setting in ("lora", "lora_rank") and not now:
            yield setting, LORA_RANK
        choices = typing.get_args(kind) if typing.get_origin(kind) is typing.Literal else ()
        eight_bit = [choice for choice in choices if "8bit" in str(choice).replace("-", "").replace("_", "")]
        if eight_bit and now not in eight_bit:
            yield setting, eight_bit[0]
