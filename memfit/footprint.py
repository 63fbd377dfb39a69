"""Footprint: a trace replayed through a device's allocator: peak bytes of each phase, where, and by what."""

from __future__ import annotations

from dataclasses import dataclass

from memfit.events import CutParameters


@dataclass(frozen=True, kw_only=True)
class PeakLocation:
    """The place in the job where something happened: module path and operator."""

    module: str
    operator: str


@dataclass(frozen=True, kw_only=True)
class Request:
    """One allocation: bytes asked for, and by whom."""

    bytes: int
    module: str
    operator: str
    phase: str = ""


@dataclass(frozen=True, kw_only=True)
class PhaseFootprint:
    """Peaks of one phase, in bytes. They may fall at different moments; ``at`` and ``categories`` are allocated's."""

    allocated_bytes: int
    reserved_bytes: int
    process_bytes: int
    process_bytes_low: int
    process_bytes_high: int
    at: PeakLocation
    largest_request: Request
    """The largest request; the last one where several are as large."""
    categories: dict[str, int]


@dataclass(frozen=True, kw_only=True)
class Footprint:
    """The phases of a job on a device, and whether they fit."""

    phases: dict[str, PhaseFootprint]
    fits: bool
    verdict: str
    """yes, no, or close (the limit lies inside the interval)."""
    limiting_phase: str
    headroom_bytes: int
    failed_request: Request | None
    net_kind: str = ""
    """Family and precision of the nets: what the interval's errors were measured on."""
    measured_runs: int | None = None
    """Measured runs of this kind behind the interval; 0: none was ever measured, so the widest interval is given.
    None: the replay is exact (CPU)."""
    plan_searches: int = 0
    """Times that cuDNN tries its plans (``cudnn.benchmark``): a reading of the card may then rise for a moment, up to
    all of it, without any need of it."""
    assumed: tuple[str, ...] = ()
    """Assumptions about data, as in ``Trace.assumed``."""
    tensor_parallel: CutParameters | None = None
    """What ``tp`` cuts; None without it."""
