"""The largest micro-batch, sequence or setting that fits: sizes are predicted until one fits and the next does not.

Storages grow nearly in proportion to the size, so that the traces of two sizes lead close to the limit: their storages'
bytes are interpolated and replayed. Every candidate is then predicted itself, exactly as ``memfit predict`` does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from memfit.apply.phase_memory import with_settings
from memfit.device.hardware.catalogue import Device
from memfit.errors import InputError
from memfit.footprint import Footprint
from memfit.geometry import MOST
from memfit.job import Job, Shape
from memfit.planner.predict import checkpoint_all, default_checkpointing, plain_nets
from memfit.planner.prediction import Prediction, footprint_on
from memfit.planner.traced_questions import TracedQuestions
from memfit.trace.interpolation import interpolated

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


def batch_policies(job: Job) -> Iterator[Policy]:
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
    sizes = _Sizes(policy, name, device, questions, vary)
    size, exact = largest_size(sizes.needs, device.usable_bytes or 0, sizes.likely)
    prediction = sizes.predictions[size] if size is not None else None
    return Largest(device=device, policy=policy, size=size, prediction=prediction, exact=exact)


class _Sizes:
    """Predictions of one policy on one device by size; arguments as of ``largest_of``."""

    def __init__(
        self, policy: Policy, name: str, device: Device, questions: TracedQuestions,
        vary: Callable[[Job, int], tuple[Job, Shape]],
    ) -> None:  # fmt: skip
        self._policy, self._name, self._device = policy, name, device
        self._questions, self._vary = questions, vary
        self.predictions: dict[int, Prediction] = {}

    def needs(self, size: int) -> int:
        """Process bytes of a size."""
        job, shape = self._vary(self._policy.job, size)
        self.predictions[size] = self._questions.predict(
            job, self._name, shape, self._device, checkpointing=self._policy.checkpointing
        )
        return self._bytes(self.predictions[size].footprint)

    def likely(self, low: int, other: int, high: int) -> int | None:
        """The largest size from ``low`` to below ``high`` that fits if storages grow as between ``low`` and ``other``;
        None where their events differ."""
        first, second = (self.predictions[size].trace for size in (low, other))
        known = self.predictions[low]

        def needs(more: int) -> int:
            trace = interpolated(first, second, (more - 1) / (other - low))
            if trace is None:
                return (self._device.usable_bytes or 0) + 1
            return self._bytes(footprint_on(trace, self._device, known.world, mesh=known.mesh))

        if interpolated(first, second, 1.0) is None:
            return None
        more, _ = largest_size(needs, self._device.usable_bytes or 0, most=high - low)
        return None if more is None else low + more - 1

    def _bytes(self, footprint: Footprint) -> int:
        need = max(phase.process_bytes for phase in footprint.phases.values())
        return need if footprint.fits else max(need, (self._device.usable_bytes or 0) + 1)


def largest_size(
    needs: Callable[[int], int],
    limit: int,
    likely: Callable[[int, int, int], int | None] | None = None,
    most: int = MOST,
) -> tuple[int | None, bool]:
    """(the largest size whose need is within a limit, whether the next one's is known to exceed it).

    Args:
        needs: bytes of a size from 1 on; near enough to growing with it.
        likely: (the largest size known to be within, another known size, a size that is too large) to an estimate of
            the answer; None: the line through the needs of the two.
        most: the largest size that is asked for.
    """
    known = {1: needs(1)}
    if known[1] > limit:
        return None, True
    low, high = 1, most + 1
    while high - low > 1 and len(known) < QUESTIONS:
        size = _next_size(known, low, high, limit, likely)
        known[size] = needs(size)
        if known[size] <= limit:
            low = max(low, size)
        else:
            high = min(high, size)
    return low, high - low == 1 and high in known


def _next_size(
    known: Mapping[int, int], low: int, high: int, limit: int, likely: Callable[[int, int, int], int | None] | None
) -> int:
    """The next size to try: the likely one, one on the line through the two known sizes next to the limit, or halfway
    between them."""
    if len(known) == 1:
        return 2
    if len(known) > SECANT and len(known) % 2:
        return (low + high) // 2 if high in known else min(2 * low, high - 1)
    other = high if high in known else max(size for size in known if size < low)
    estimate = likely(low, other, high) if likely is not None else None
    if estimate is not None:
        return min(max(estimate, low + 1), high - 1)
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
