"""How far measured windows lay from their estimated time, by device and kind of net.

time_errors.toml is written by bench/timing.py --fit from windows that were really run; each interval holds all of them.
"""

from __future__ import annotations

import tomllib
from dataclasses import dataclass, replace
from functools import cache
from importlib.resources import files

from memfit.device.hardware.catalogue import Device
from memfit.plan import Plan


@dataclass(frozen=True, kw_only=True)
class TimeError:
    """Bounds of measured over estimated seconds, minus 1, from so many runs; None where none was measured."""

    low: float | None = None
    high: float | None = None
    runs: int = 0
    words: str = ""


@cache
def _measured() -> dict[str, dict[str, float]]:
    return tomllib.loads(files("memfit.planner.timing").joinpath("time_errors.toml").read_text())


def time_error(net_kind: str, device: Device) -> TimeError:
    """Of nets of this kind (``Trace.net_kind``) on this device."""
    there = {key.partition(": ")[2]: table for key, table in _measured().items() if key.startswith(f"{device.key}: ")}
    if not there:
        where = "card" if device.is_cuda else "device"
        return TimeError(words=f"an estimate; its error was not measured on this {where}")
    found = there.get(net_kind)
    if found is None:
        low, high = min(one["low"] for one in there.values()), max(one["high"] for one in there.values())
        words = f"an estimate; of nets of other kinds, {low:+.0%} to {high:+.0%} was measured on {device.key}"
        return TimeError(low=low, high=high, words=words)
    low, high, runs = found["low"], found["high"], int(found["runs"])
    words = (
        f"an estimate; measured were {low:+.0%} to {high:+.0%} of it, in {runs} runs of {net_kind} nets on {device.key}"
    )
    return TimeError(low=low, high=high, runs=runs, words=words)


def with_time_error(plan: Plan, net_kind: str, device: Device, probed: bool) -> Plan:
    """The plan with the measured error of its time beside it.

    Args:
        probed: whether its time is held to a window of this job that was really run on this device.
    """
    if plan.step_seconds is None:
        return replace(plan, reasons={**plan.reasons, "time": "unknown: so are the device's rates"})
    if probed:
        words = "an estimate, held to a window of this job that memfit probe ran on this device"
        return replace(plan, reasons={**plan.reasons, "time": words})
    error = time_error(net_kind, device)
    low, high = (None if part is None else plan.step_seconds * (1 + part) for part in (error.low, error.high))
    return replace(plan, step_seconds_low=low, step_seconds_high=high, reasons={**plan.reasons, "time": error.words})
