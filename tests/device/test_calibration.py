"""What calibrate measures, keeps and gives to later predictions.

python -m pytest tests/device/test_calibration.py
"""

import json
import sys
from dataclasses import replace

import pytest
import torch

from memfit.device.hardware import calibrate
from memfit.device.hardware.calibration import (
    FILE,
    SOURCE,
    Rates,
    keep_rates,
    processor,
    rates,
    threads_here,
    with_rates,
)
from memfit.device.hardware.catalogue import find_device
from memfit.device.hardware.local_devices import local_cpu, local_devices
from memfit.user_cache import cache_folder
from tests.device.test_local_devices import simulated_nvml

MEASURED = Rates(
    device=processor(),
    threads=3,
    torch="2.13.0",
    matmul_flops={"fp32": 5e10, "bf16": 2e11},
    elementwise_bytes={"fp32": 9e9},
)
CARD = replace(
    MEASURED,
    device="NVIDIA GeForce RTX 4090",
    threads=0,
    matmul_flops={"fp32": 8e13, "tf32": 7e13, "bf16": 1.5e14, "fp16": 1.6e14},
    copy_to_bytes=2.5e10,
    context_bytes=450 << 20,
    context_low=300 << 20,
)


@pytest.fixture(autouse=True)
def own_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("OMP_NUM_THREADS", "3")


def test_rates_are_kept_by_machine_and_threads(monkeypatch):
    assert rates() is None
    keep_rates(MEASURED)
    keep_rates(CARD)
    assert rates() == MEASURED
    assert rates("NVIDIA GeForce RTX 4090") == CARD
    assert rates("NVIDIA A100") is None
    monkeypatch.setenv("OMP_NUM_THREADS", "4")
    assert rates() is None


@pytest.mark.parametrize("text", ["{torn", "[]", '{"format": 0, "rates": {}}', '{"format": 1, "rates": []}'])
def test_a_file_that_is_not_ours_counts_as_none_and_is_replaced(text):
    cache_folder().mkdir()
    (cache_folder() / FILE).write_text(text)
    assert rates() is None
    keep_rates(MEASURED)
    assert rates() == MEASURED


def test_rates_of_another_version_are_not_read():
    keep_rates(MEASURED)
    kept = json.loads((cache_folder() / FILE).read_text())
    for rate in kept["rates"].values():
        rate["another_figure"] = 1
    (cache_folder() / FILE).write_text(json.dumps(kept))
    assert rates() is None


def test_the_processor_here_has_the_measured_rates_and_says_so():
    assert (local_cpu().fp32_flops, local_cpu().bandwidth) == (None, None)
    keep_rates(MEASURED)
    cpu = local_cpu()
    assert (cpu.fp32_flops, cpu.bf16_flops, cpu.fp16_flops, cpu.bandwidth) == (5e10, 2e11, None, 9e9)
    assert cpu.sources["fp32_flops"] == cpu.sources["bandwidth"] == SOURCE
    assert "fp16_flops" not in cpu.sources


def test_a_simulated_card_here_has_its_measured_context(monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", simulated_nvml("NVIDIA GeForce RTX 4090"))
    keep_rates(CARD)
    card = local_devices()[0]
    assert (card.context_low, card.context_bytes, card.context_high) == (300 << 20, 450 << 20, 600 << 20)
    assert (card.bf16_flops, card.link_bytes, card.sources["context_bytes"]) == (1.5e14, 2.5e10, SOURCE)
    assert find_device("rtx4090").bf16_flops == 165.2e12, "the catalogue's own stays"


def test_without_rates_a_device_is_as_it_was():
    device = find_device("a100-40gb")
    assert with_rates(device, None) is device


def test_this_processor_is_measured(monkeypatch):
    monkeypatch.setattr(calibrate, "ROUND_SECONDS", 0.001)
    monkeypatch.setattr(calibrate, "PRECISIONS", {"fp32": torch.float32, "tf32": torch.float32, "bf16": torch.bfloat16})
    measured = calibrate.calibrate(torch.device("cpu"))
    assert measured.matmul_flops.keys() == measured.convolution_flops.keys() == {"fp32", "bf16"}
    assert 1e8 < measured.matmul_flops["fp32"] < 1e14
    assert 1e7 < measured.elementwise_bytes["fp32"] < 1e13
    assert 1e-8 < measured.call_seconds < 1e-2
    assert (measured.context_bytes, measured.copy_to_bytes, measured.cublas_workspace_bytes) == (None, None, None)
    keep_rates(measured)
    monkeypatch.setenv("OMP_NUM_THREADS", str(measured.threads))
    assert rates() == measured
    assert threads_here() == measured.threads
