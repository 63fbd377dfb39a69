"""The device of a trace request."""

from __future__ import annotations

from memfit.device.hardware.catalogue import Device, find_device, with_memory
from memfit.device.hardware.local_devices import local_cpu
from memfit.script.outcome import TraceRequest


def requested_device(request: TraceRequest) -> Device:
    """Returns the card of the catalogue or this machine's processor, with the memory of ``--memory`` if it is given."""
    device = local_cpu() if request.device == "cpu" else find_device(request.device)
    return device if request.memory_bytes is None else with_memory(device, request.memory_bytes)
