"""An estimate of a window's time from its operators.

On this machine's processor each distinct operator was timed here (``memfit.trace.durations``). For a card, each takes
the longer of its arithmetic and its memory traffic, and at least a launch: the roofline model (Williams, Waterman,
Patterson, 2009). A copy between host and card goes at the link's rate, and what is written on the host, as by a step
of state that is offloaded, at that of one core, which is what torchrun gives a rank. Left out: kernels that reach a
part of the peak, overlap. Good enough to rank plans of one card.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from memfit.device.hardware.catalogue import Device
from memfit.device.hardware.cluster import GroupLink
from memfit.events import ON_HOST, TO_DEVICE, TO_HOST, Trace
from memfit.planner.timing.collective_time import collective_rows

LAUNCH = 5e-6
"""Seconds that a kernel takes at least, from one launch to the next."""
OVERHEADS = {"full": (60e-6, 2e-6), "selective": (60e-6, 10e-6), "offload": (20e-6, 10e-6)}
"""Seconds that the host takes for one call, and for each operator in it, where a card waits for them; by mode."""
CPU_FLOPS, CPU_BANDWIDTH = 2e10, 5e9
"""Of one core, for the few calls that cannot be timed by themselves, where ``memfit calibrate`` was not run."""


def operator_seconds(
    trace: Trace, device: Device, precision: str, calls: Sequence[str | None] = (),
    links: Mapping[str, GroupLink] | None = None,
) -> np.ndarray | None:  # fmt: skip
    """float (operators,) seconds of each; None where the device's rates are not known.

    Args:
        precision: of the job; decides the rate of products.
        calls: for a CPU, each operator's description, as ``memfit.trace.session`` gives it.
        links: what joins the ranks of each dimension of a mesh, for collectives inside of nets, which the next operator
            waits for; None: they count as copies within the card.
    """
    rates = _rates(device, precision)
    if rates is None:
        return None
    flops, bandwidth, launch = rates
    seconds = np.maximum(trace.operator_flops / flops, trace.operator_bytes / bandwidth) + launch
    if device.link_bytes is not None:
        link = np.isin(np.array(trace.names), (TO_HOST, TO_DEVICE))[trace.operator_name]
        seconds[link] = trace.operator_bytes[link] / device.link_bytes + launch
    if device.is_cuda:
        host = np.array([name.startswith(ON_HOST) for name in trace.names], bool)[trace.operator_name]
        seconds[host] = np.maximum(trace.operator_flops[host] / CPU_FLOPS, trace.operator_bytes[host] / CPU_BANDWIDTH)
    if links is not None:
        rows, takes = collective_rows(trace, links)
        seconds[rows] = takes
    if calls:
        from memfit.trace.durations import durations

        timed = durations({call for call in calls if call is not None})
        for row, call in enumerate(calls):
            known = timed.get(call) if call is not None else None
            if known is not None:
                seconds[row] = known
    return seconds


def window_seconds(
    trace: Trace, device: Device, micro_batches: float, precision: str, *, traced: int = 1
) -> float | None:
    """Seconds of a window of so many micro-batches; None where the device's rates are unknown.

    Args:
        micro_batches: a last one that is smaller counts by its share.
        traced: micro-batches in the trace's last training window, of which each takes the mean.
    """
    seconds = operator_seconds(trace, device, precision)
    if seconds is None:
        return None
    start, end = [(start, end) for name, start, end in trace.phases if name == "train"][-1]
    rows = slice(int(trace.operator[start]), int(trace.operator[end - 1]) + 1) if end > start else slice(0, 0)
    parts = np.array(trace.parts)[trace.operator_part[rows]]
    repeated = np.isin(parts, ("fetch", "forward", "backward"))
    return float(seconds[rows][repeated].sum() / traced * micro_batches + seconds[rows][~repeated].sum())


def _rates(device: Device, precision: str) -> tuple[float, float, float] | None:
    """Operations and bytes a second, and seconds of a launch."""
    flops = {"bf16": device.bf16_flops, "fp16": device.fp16_flops}.get(precision) or device.fp32_flops
    if not device.is_cuda:
        return flops or CPU_FLOPS, device.bandwidth or CPU_BANDWIDTH, 0.0
    if flops is None or device.bandwidth is None:
        return None
    return flops, device.bandwidth, LAUNCH
