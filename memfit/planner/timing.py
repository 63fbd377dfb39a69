"""An estimate of a window's time from its operators: each takes the longer of its arithmetic and its memory traffic.

The roofline model (Williams, Waterman, Patterson, 2009). Left out: launch gaps, kernels that reach a part of the peak,
overlap. Good enough to rank plans of one card; unknown where the catalogue has no rates.
"""

from __future__ import annotations

import numpy as np

from memfit.device.catalogue import Device
from memfit.events import Trace


def window_seconds(trace: Trace, device: Device, micro_batches: int) -> float | None:
    """Seconds of one window of so many micro-batches; None where the device's rates are not known.

    Args:
        trace: its second training window has min(micro_batches, 2) micro-batches.
    """
    flops, bandwidth = device.fp32_flops, device.bandwidth
    if flops is None or bandwidth is None:
        return None
    start, end = [(start, end) for name, start, end in trace.phases if name == "train"][-1]
    rows = slice(int(trace.operator[start]), int(trace.operator[end - 1]) + 1) if end > start else slice(0, 0)
    seconds = np.maximum(trace.operator_flops[rows] / flops, trace.operator_bytes[rows] / bandwidth)
    parts = np.array(trace.parts)[trace.operator_part[rows]]
    repeated = np.isin(parts, ("fetch", "forward", "backward"))
    traced = min(micro_batches, 2)
    return float(seconds[repeated].sum() * micro_batches / traced + seconds[~repeated].sum())
