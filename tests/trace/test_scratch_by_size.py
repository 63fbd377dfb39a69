"""Scratch of a large step from smaller ones: fewer calls are measured, and the peaks are those of a measured step.

python -m pytest tests/trace/test_scratch_by_size.py
"""

from pathlib import Path

import pytest
import torch
from torch import nn

from memfit.device.hardware.catalogue import find_device, with_memory
from memfit.job import Shape
from memfit.planner.asked_job import AskedJob
from memfit.planner.job_reading import facts_of
from memfit.planner.largest import by_items, largest_of
from memfit.planner.predict import predict
from memfit.trace import operator_scratch, scratch_by_size
from memfit.trace.operator_scratch import Key
from testing.linear_layer import LinearLayer

CPU = with_memory(find_device("cpu"), 1 << 30)
LARGE = 40


class Convolutions(LinearLayer):
    """Wide layers whose tensors make the peak, and narrow ones with scratch of their own."""

    def nets(self):
        layers: list[nn.Module] = [nn.Conv2d(3, 24, 3, padding=1), nn.GELU(), nn.AvgPool2d(4)]
        for width in (24, 8, 8, 8):
            layers += [nn.Conv2d(width, 8, 3, padding=1), nn.GroupNorm(2, 8)]
        return {"net": nn.Sequential(*layers)}

    def batch(self, shape):
        return {"x": torch.zeros(shape.items, 3, 64, 64)}


@pytest.fixture
def counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many calls each measurement ran; nothing is known from before."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    calls: list[int] = []
    really = operator_scratch._measure_really

    def counting(keys: list[Key]) -> dict[Key, int | None]:
        calls.append(len(keys))
        return really(keys)

    monkeypatch.setattr(operator_scratch, "_measure_really", counting)
    return calls


def test_a_large_step_measures_few_calls_and_has_the_peaks_of_a_measured_one(counts: list[int]) -> None:
    asked = AskedJob("convolutions", Convolutions)
    for items in (2, 3, 4):
        asked.predict(Shape(items=items), CPU)
    small, few = counts[-1], len(counts)
    spared = asked.predict(Shape(items=LARGE), CPU)
    assert 0 < sum(counts[few:]) < small // 2
    whole = predict(Convolutions(), "convolutions", Shape(items=LARGE), CPU)
    assert sum(counts[few:]) == small
    assert spared.footprint.phases == whole.footprint.phases


def test_steps_near_each_other_all_serve_a_large_one(counts: list[int]) -> None:
    """As ``memfit max`` traces them; 14 alone is too far from 230."""
    asked = AskedJob("convolutions", Convolutions)
    for items in (1, 2, 14, 21, 28):
        asked.predict(Shape(items=items), CPU)
    few = len(counts)
    asked.predict(Shape(items=230), CPU)
    assert 0 < sum(counts[few:]) < max(counts) // 2


def test_the_largest_micro_batch_is_found_without_measuring_every_call_of_it(counts: list[int]) -> None:
    job = Convolutions()
    limit = predict(job, "convolutions", Shape(items=LARGE), CPU).footprint.phases["train"].process_bytes
    card = with_memory(CPU, limit)
    with AskedJob("convolutions", lambda: job) as asked:
        policy = facts_of(job).policies[0]
        answer = largest_of(policy, card, asked, by_items(None))
    assert answer.exact
    assert answer.size is not None
    assert answer.size >= scratch_by_size.FARTHEST
    assert counts[-1] < max(counts) // 2


@pytest.mark.parametrize(
    ("scratch", "estimate"),
    [
        ((6, 8, 10), 16),
        ((7, 7, 7), 7),
        ((0, 0, 0), 0),
        ((6, 8, 11), None),
        ((6, None, 10), None),
        ((12, 10, 8), 2),
        ((10, 7, 4), None),
    ],
)
def test_an_estimate_is_on_the_line_through_all_smaller_steps(scratch, estimate) -> None:
    assert scratch_by_size._on_line((2, 3, 4), scratch, 7) == estimate


def test_an_estimate_between_whole_bytes_is_rounded_up() -> None:
    assert scratch_by_size._on_line((2, 4, 6), (0, 1, 2), 9) == 4
