"""What a plan leaves of a CPU's budget for what is no tensor: Python's objects, autograd's graph, the heap's gaps."""

from __future__ import annotations

import math
from dataclasses import replace

from memfit.device.hardware.catalogue import Device

HOST_MARGIN_BYTES, HOST_MARGIN = 24 << 20, 0.02
"""Of the budget: f5_tts/tiny needs 12 to 24 MiB beyond (bench/host_margin.py)."""


def without_cpu_margin(device: Device) -> Device:
    """A CPU with what is left of its budget for tensors; a card as it is."""
    if device.is_cuda or device.usable_bytes is None:
        return device
    left = device.usable_bytes - HOST_MARGIN_BYTES - int(device.usable_bytes * HOST_MARGIN)
    return replace(device, usable_bytes=max(left, 1))


def cpu_margin_bytes(device: Device) -> int:
    """Bytes of a device's budget that stay reserved for what is no tensor; 0 on a card."""
    return (device.usable_bytes or 0) - (without_cpu_margin(device).usable_bytes or 0)


def budget_for(nbytes: int, device: Device) -> int:
    """The least budget of which so many bytes are left for tensors."""
    return nbytes if device.is_cuda else math.ceil((nbytes + HOST_MARGIN_BYTES) / (1 - HOST_MARGIN))
