"""pytest tests/device/test_benchmarks.py: what the allocator's events of real work are read from."""

import warnings

import torch

from memfit.device.hardware.benchmarks import AllocatorEvents


def test_events_are_read_without_an_object_of_each_in_python_and_without_warnings(monkeypatch):
    monkeypatch.delattr(torch.autograd.profiler.profile, "_parse_kineto_results")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with AllocatorEvents() as events, events.phase("train"):
            torch.ones(1 << 10)
    assert events.peaks()["train"].allocated_bytes == 4 << 10
