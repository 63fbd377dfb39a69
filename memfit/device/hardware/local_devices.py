"""What is in this machine: its CUDA cards, through the driver's own library, and its processor. No torch is needed.

Rates, and a card's context, are those that ``memfit calibrate`` measured here, where it did."""

from __future__ import annotations

import os
from dataclasses import replace

import psutil

from memfit.device.hardware.calibration import rates, with_rates
from memfit.device.hardware.catalogue import Device, catalogue, find_device


def local_devices() -> list[Device]:
    """The CUDA cards in the driver's order, then the CPU."""
    return [*_cards(), local_cpu()]


def local_cpu() -> Device:
    """This machine's processor, with the memory that the operating system reports."""
    memory, cores = psutil.virtual_memory(), os.cpu_count()
    source = "the operating system"
    cpu = replace(
        find_device("cpu"),
        name=f"CPU, {cores} cores",
        memory_bytes=memory.total,
        usable_bytes=memory.available,
        sources={"memory_bytes": f"{source}: total", "usable_bytes": f"{source}: available now"},
    )
    return with_rates(cpu, rates())


def _cards() -> list[Device]:
    try:
        import pynvml

        pynvml.nvmlInit()
    except Exception:
        return []
    try:
        return [_card(pynvml, pynvml.nvmlDeviceGetHandleByIndex(i)) for i in range(pynvml.nvmlDeviceGetCount())]
    finally:
        pynvml.nvmlShutdown()


def _card(nvml: object, handle: object) -> Device:
    """A card as NVML describes it; rates and links are measured ones, or the catalogue's, where its name is there."""
    name = nvml.nvmlDeviceGetName(handle)  # type: ignore[attr-defined]
    memory = nvml.nvmlDeviceGetMemoryInfo(handle, version=nvml.nvmlMemory_v2)  # type: ignore[attr-defined]
    capability = nvml.nvmlDeviceGetCudaComputeCapability(handle)  # type: ignore[attr-defined]
    known = next((device for device in catalogue().values() if device.name == name), None)
    total = memory.total - memory.reserved
    sources = {"memory_bytes": "NVML: total less reserved", "usable_bytes": "NVML: free now"}
    card = replace(
        known or Device(key=name.lower().replace(" ", "-"), name=name),
        compute_capability=tuple(capability),
        memory_bytes=total,
        usable_bytes=memory.free,
        sources={**(known.sources if known else {}), **sources},
    )
    return with_rates(card, rates(name))
