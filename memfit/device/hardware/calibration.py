"""What ``memfit calibrate`` measured on this machine: rates of operators, copies, context. Read without torch."""

from __future__ import annotations

import os
import platform
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from memfit.device.hardware.catalogue import Device
from memfit.user_cache import is_amount, is_count, keep, read_kept

FILE = "calibrated.json"
FORMAT = 1
SOURCE = "measured on this machine by memfit calibrate"


@dataclass(frozen=True, kw_only=True)
class Rates:
    """One device's measured figures. By precision (fp32, tf32, bf16, fp16); a precision it does not run is absent."""

    device: str
    """The device's name, as its driver gives it."""
    threads: int
    """Threads of the CPU that the operators ran on; 0 on a GPU."""
    torch: str
    matmul_flops: dict[str, float] = field(default_factory=dict)
    """Floating point operations a second of a large square product."""
    convolution_flops: dict[str, float] = field(default_factory=dict)
    """FLOP a second of a 3 x 3 convolution with 128 channels, forward."""
    attention_flops: dict[str, float] = field(default_factory=dict)
    """FLOP a second of scaled_dot_product_attention with a head size of 64, forward."""
    elementwise_bytes: dict[str, float] = field(default_factory=dict)
    """Bytes read and written a second by an addition of two large tensors."""
    call_seconds: float | None = None
    """Seconds of an addition of two tensors of one element: what a call costs besides its work."""
    host_copy_bytes: float | None = None
    """A second, from memory of the host to other memory of it that was used before."""
    copy_to_bytes: float | None = None
    """A second, from pinned memory of the host to the GPU; None on a CPU."""
    copy_from_bytes: float | None = None
    context_bytes: int | None = None
    """Held by a process outside the allocator once every kind of operator has run; None on a CPU."""
    context_low: int | None = None
    """Bytes outside of the allocator after a single product."""
    cublas_workspace_bytes: int | None = None
    """That the first product takes out of the allocator; None on a CPU."""


def machine(device: str, threads: int) -> str:
    """The key of a device's rates in the file."""
    return f"{device}, {threads} threads" if threads else device


def rates(device: str | None = None) -> Rates | None:
    """The rates that were measured on a device here; None where none were.

    Args:
        device: what its driver calls it; None: the CPU.
    """
    kept = read_kept(FILE)
    name = device or processor()
    known = kept.get("rates") if _ours(kept) else None
    kept_rates = known.get(machine(name, 0 if device else threads_here())) if isinstance(known, dict) else None
    if not isinstance(kept_rates, dict) or kept_rates.keys() != {field.name for field in fields(Rates)}:
        return None
    return Rates(**kept_rates) if _are_rates(kept_rates) else None


def _are_rates(values: dict[str, Any]) -> bool:
    """Whether every figure has the type that is kept, and is a finite number above 0."""
    figures = {name: value for name, value in values.items() if name not in ("device", "threads", "torch")}
    by_precision = [value for value in figures.values() if isinstance(value, dict)]
    single = [value for value in figures.values() if not isinstance(value, dict) and value is not None]
    dicts = ("matmul_flops", "convolution_flops", "attention_flops", "elementwise_bytes")
    return (
        all(isinstance(figures[name], dict) for name in dicts)
        and len(by_precision) == len(dicts)
        and all(is_amount(value) and value for value in [*single, *(v for each in by_precision for v in each.values())])
        and isinstance(values["device"], str)
        and isinstance(values["torch"], str)
        and is_count(values["threads"])
    )


def keep_rates(measured: Rates) -> Path:
    """Puts a device's rates into the file, beside those of others."""
    before = read_kept(FILE)
    rates_before = before.get("rates") if _ours(before) else None
    known: dict[str, Any] = dict(rates_before) if isinstance(rates_before, dict) else {}
    known[machine(measured.device, measured.threads)] = asdict(measured)
    return keep(FILE, {"format": FORMAT, "rates": known})


def with_rates(device: Device, measured: Rates | None) -> Device:
    """The device with its measured figures in place of the catalogue's; None: as it is."""
    if measured is None:
        return device
    flops = measured.matmul_flops
    values: dict[str, Any] = {
        f"{name}_flops": flops[name] for name in ("fp32", "tf32", "bf16", "fp16") if name in flops
    }
    values["bandwidth"] = measured.elementwise_bytes.get("fp32")
    values["link_bytes"] = measured.copy_to_bytes
    if measured.context_bytes is not None and measured.context_low is not None:
        high = 2 * measured.context_bytes - measured.context_low
        values |= {"context_low": measured.context_low, "context_bytes": measured.context_bytes, "context_high": high}
    values = {name: value for name, value in values.items() if value is not None}
    return replace(device, **values, sources={**device.sources, **dict.fromkeys(values, SOURCE)})


def processor() -> str:
    """The processor's own name and its number of cores."""
    name = platform.processor() or platform.machine()
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        name = next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        pass
    return f"{name}, {os.cpu_count()} cores"


def threads_here() -> int:
    """The threads that torch would take: OMP_NUM_THREADS, else one for each physical core."""
    import psutil

    set_to = os.environ.get("OMP_NUM_THREADS", "")
    if set_to.isdigit() and int(set_to):
        return int(set_to)
    return psutil.cpu_count(logical=False) or os.cpu_count() or 1


def _ours(kept: dict[str, Any]) -> bool:
    return kept.get("format") == FORMAT and isinstance(kept.get("rates"), dict)
