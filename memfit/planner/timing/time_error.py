"""How far measured windows lay from their estimated time, by device and kind of net.

time_errors.toml is written by bench/timing.py --fit from windows that were really run; each interval holds all of them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from importlib.resources import files

from memfit import toml
from memfit.device.hardware.catalogue import Device
from memfit.plan import Plan


@dataclass(frozen=True, kw_only=True)
class TimeError:
    """Bounds of measured over estimated seconds, minus 1, from so many runs; None where none was measured.

    They hold the estimate itself too, so ``low`` is at most 0 and ``high`` at least 0; ``words`` say what was measured.
    """

    low: float | None = None
    high: float | None = None
    runs: int = 0
    words: str = ""


@cache
def _measured() -> dict[str, dict[str, float]]:
    return toml.loads(files("memfit.planner.timing").joinpath("time_errors.toml").read_text("utf-8"))


def time_error(net_kind: str, device: Device) -> TimeError:
    """The error of estimated times for nets of this kind (``Trace.net_kind``) on this device."""
    intervals = {
        key.partition(": ")[2]: table for key, table in _measured().items() if key.startswith(f"{device.key}: ")
    }
    if not intervals:
        where = "card" if device.is_cuda else "device"
        return TimeError(words=f"estimated; accuracy on this {where} unknown")
    measured = intervals.get(net_kind)
    if measured is None:
        low, high = min(kind["low"] for kind in intervals.values()), max(kind["high"] for kind in intervals.values())
        words = f"estimated; runs of other model types on {device.key} deviate by {low:+.0%} to {high:+.0%}"
        return _around_estimate(low, high, 0, words)
    low, high, runs = measured["low"], measured["high"], int(measured["runs"])
    words = f"estimated; {runs} runs of {net_kind} nets on {device.key} deviate by {low:+.0%} to {high:+.0%}"
    return _around_estimate(low, high, runs, words)


def _around_estimate(low: float, high: float, runs: int, words: str) -> TimeError:
    return TimeError(low=min(low, 0.0), high=max(high, 0.0), runs=runs, words=words)


def with_time_error(plan: Plan, net_kind: str, device: Device, probed: bool) -> Plan:
    """The plan with the measured error of its time beside it.

    Args:
        probed: whether its time is held to a window of this job that was really run on this device.
    """
    if plan.step_seconds is None:
        return replace(plan, reasons={**plan.reasons, "time": "unknown, because the device's rates are unknown"})
    if probed:
        words = "estimated from a window of this job that memfit probe ran on this device"
        return replace(plan, reasons={**plan.reasons, "time": words})
    error = time_error(net_kind, device)
    low, high = (None if part is None else plan.step_seconds * (1 + part) for part in (error.low, error.high))
    return replace(plan, step_seconds_low=low, step_seconds_high=high, reasons={**plan.reasons, "time": error.words})
