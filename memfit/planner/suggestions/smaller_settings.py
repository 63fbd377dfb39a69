"""Settings of a job that make it smaller where nothing fits: suggested with their effect, never applied.

A job lists such settings and what each changes (``Job.smaller_settings``). Each goes one step down, a number to its
half, a word to the next of its kind, and the job is traced at its smallest micro-batch with every block recomputed.
"""

from __future__ import annotations

import typing
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from memfit.apply.phase_memory import with_settings
from memfit.device.hardware.catalogue import Device
from memfit.errors import InputError
from memfit.footprint import Footprint
from memfit.job import Job
from memfit.planner.predict import checkpoint_all, footprint_on, plain_nets
from memfit.trace.step import Tracing, trace_job

MOST = 3
"""Steps down to try for one setting, at most."""


@dataclass(frozen=True, kw_only=True)
class SmallerSetting:
    """A setting at another value: the least that the process then takes, what that saves, whether it fits."""

    setting: str
    now: Any
    value: Any
    process_bytes: int
    saves_bytes: int
    fits: bool
    changes: str


def smaller_settings(job: Job, how: Tracing, device: Device) -> list[SmallerSetting]:
    """Lowers each setting of the job until it fits or has no smaller value; the largest savings come first."""
    asked = {**({"longest": "longer items are cut or left out"} if job.longest else {}), **job.smaller_settings}
    if unknown := next((name for name in asked if name not in job.setting_types()), None):
        known = ", ".join(name for name in job.setting_types())
        raise InputError(
            f"{type(job).__name__}.smaller_settings: {unknown!r}",
            "no setting of the job has that name",
            f"write smaller_settings = {{setting: what it changes}} with some of {known}",
        )
    before = _least(job, how, device)
    smaller = []
    for setting, changes in asked.items():
        lowered = None
        for value in _steps(job, setting):
            try:
                seen = _least(with_settings(job, {setting: value}), how, device)
            except InputError:
                continue
            takes = _takes(seen)
            lowered = SmallerSetting(
                setting=setting, now=getattr(job, setting), value=value, process_bytes=takes,
                saves_bytes=_takes(before) - takes, fits=seen.fits, changes=changes,
            )  # fmt: skip
            if seen.fits:
                break
        if lowered is not None and lowered.saves_bytes > 0:
            smaller.append(lowered)
    return sorted(smaller, key=lambda setting: (not setting.fits, setting.process_bytes))


def _steps(job: Job, setting: str) -> Iterator[Any]:
    """Smaller values of a setting, the nearest first."""
    now, kind = getattr(job, setting), job.setting_types()[setting]
    if typing.get_origin(kind) is typing.Literal:
        options = typing.get_args(kind)
        yield from options[options.index(now) + 1 :]
        return
    for power in range(1, MOST + 1):
        value = now / 2**power
        if isinstance(now, float):
            yield value
        elif value >= 1:
            yield int(value)


def _least(job: Job, how: Tracing, device: Device) -> Footprint:
    """The job at its smallest micro-batch, every block recomputed."""
    modes = checkpoint_all(job, plain_nets(job))
    how = replace(how, checkpointing=modes, micro_batches=2)
    return footprint_on(trace_job(job, how.shape_of(job, job.longest or 1), how), device)


def _takes(seen: Footprint) -> int:
    return max(phase.process_bytes for phase in seen.phases.values())
