"""What is in this machine."""

import sys
from types import SimpleNamespace

import psutil
import pytest

from memfit.device.hardware.local_devices import local_cpu, local_devices


def test_the_processor_is_last_with_the_memory_of_this_machine() -> None:
    cpu = local_devices()[-1]
    assert cpu == local_cpu() or cpu.usable_bytes != local_cpu().usable_bytes, (
        "only the free memory may change meanwhile"
    )
    assert (cpu.key, cpu.memory_bytes) == ("cpu", psutil.virtual_memory().total)
    assert cpu.usable_bytes is not None
    assert 0 < cpu.usable_bytes <= psutil.virtual_memory().total


def simulated_nvml(name: str) -> SimpleNamespace:
    memory = SimpleNamespace(total=24564 << 20, reserved=483 << 20, free=23000 << 20)
    return SimpleNamespace(
        nvmlInit=lambda: None, nvmlShutdown=lambda: None, nvmlDeviceGetCount=lambda: 1, nvmlMemory_v2=2,
        nvmlDeviceGetHandleByIndex=lambda i: i, nvmlDeviceGetName=lambda handle: name,
        nvmlDeviceGetMemoryInfo=lambda handle, version: memory,
        nvmlDeviceGetCudaComputeCapability=lambda handle: (8, 9),
    )  # fmt: skip


def test_a_simulated_card_takes_its_rates_from_the_catalogue(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", simulated_nvml("NVIDIA GeForce RTX 4090"))
    card = local_devices()[0]
    assert (card.key, card.memory_bytes, card.usable_bytes) == ("rtx4090", 24081 << 20, 23000 << 20)
    assert card.bf16_flops == 165.2e12
    assert card.sources["memory_bytes"] == "NVML: total less reserved"


def test_a_simulated_card_outside_the_catalogue_has_unknown_rates(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", simulated_nvml("NVIDIA Something"))
    card = local_devices()[0]
    assert (card.key, card.compute_capability, card.bf16_flops) == ("nvidia-something", (8, 9), None)
