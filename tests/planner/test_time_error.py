"""The error beside a plan's time, and the probe that it is held to.

python -m pytest tests/planner/test_time_error.py
"""

from dataclasses import replace

import pytest

from bench.timing import fitted
from memfit.device.hardware.catalogue import find_device, with_memory
from memfit.planner.request import PlanRequest
from memfit.planner.search.search import find_plan
from memfit.planner.timing import time_error as module
from memfit.planner.timing.probed_windows import ProbedWindow, keep_probed, probed
from memfit.planner.timing.time_error import time_error
from testing.large_nets import Dit

JOB = Dit(dim=64, depth=2, heads=4, frames=64)
CPU = with_memory(find_device("cpu"), 1 << 34)


@pytest.fixture
def measured(monkeypatch):
    table = {"cpu: attention, float32": {"low": -0.1, "high": 0.25, "runs": 4}}
    monkeypatch.setattr(module, "_measured", lambda: table)


def test_an_interval_is_that_of_the_kind_on_the_device(measured):
    result = time_error("attention, float32", CPU)
    assert (result.low, result.high, result.runs) == (-0.1, 0.25, 4)
    other = time_error("recurrent, float32", CPU)
    assert (other.low, other.high, other.runs) == (-0.1, 0.25, 0)
    card = time_error("attention, float32", find_device("rtx4090"))
    assert card.low is None
    assert "accuracy on this card unknown" in card.words


def test_an_interval_holds_the_estimate_where_every_run_took_longer(monkeypatch):
    table = {"cpu: attention, float32": {"low": 0.01, "high": 0.25, "runs": 4}}
    monkeypatch.setattr(module, "_measured", lambda: table)
    for kind in ("attention, float32", "recurrent, float32"):
        result = time_error(kind, CPU)
        assert (result.low, result.high) == (0.0, 0.25)
        assert "+1% to +25%" in result.words


def test_it_stands_beside_the_time_of_a_plan(measured):
    plan = find_plan(JOB, PlanRequest(name="dit", global_batch=4, device=CPU, micro_batch=2)).plan
    assert plan.step_seconds_low == pytest.approx(0.9 * plan.step_seconds)
    assert plan.step_seconds_high == pytest.approx(1.25 * plan.step_seconds)
    assert "4 runs" in plan.reasons["time"]


def test_a_window_that_was_probed_sets_the_scale(measured, monkeypatch, tmp_path):
    estimate = find_plan(JOB, PlanRequest(name="dit", global_batch=4, device=CPU, micro_batch=2)).plan.step_seconds
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    window = ProbedWindow(items=2, length=None, micro_batches=2, checkpointing={}, seconds=1000.0)
    keep_probed(JOB, CPU, window)
    assert probed(JOB, CPU) == window
    assert probed(JOB, replace(CPU, name="another")) is None
    assert probed(Dit(dim=32, depth=2, heads=4, frames=64), CPU) is None
    plan = find_plan(JOB, PlanRequest(name="dit", global_batch=4, device=CPU, micro_batch=2)).plan
    assert plan.step_seconds == pytest.approx(1000.0, rel=1e-6)
    assert plan.step_seconds > 100 * estimate
    assert plan.step_seconds_low is None
    assert "memfit probe" in plan.reasons["time"]


def test_the_bench_writes_intervals_that_hold_every_run():
    rows = [{"net_kind": "matmul, float32", "estimated": 2.0, "measured": measured} for measured in (1.9, 2.5, 2.0)]
    assert '["cpu: matmul, float32"]\nlow = -0.0500\nhigh = 0.2500\nruns = 3' in fitted(rows)
