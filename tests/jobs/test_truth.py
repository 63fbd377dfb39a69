"""What the speech jobs' traces say is what a CPU allocates: python -m pytest tests/jobs/test_truth.py"""

import pytest

from memfit.job import Shape
from memfit.jobs.f5_tts import F5Tiny
from memfit.jobs.gpt_sovits_s1 import S1
from memfit.jobs.gpt_sovits_s2 import Tiny
from tests.truth import compare

NARROW_S1 = {"depth": 2, "dim": 64, "clip_seconds": 3.0, "precision": "fp32"}


@pytest.mark.parametrize("micro_batches", [1, 2])
@pytest.mark.parametrize(
    ("kind", "settings", "shape"),
    [
        (F5Tiny, {}, Shape(items=3, length=100)),
        (F5Tiny, {"optimizer": "8bit", "draws": "step", "dropout": 0.1}, Shape(items=3, length=100)),
        (F5Tiny, {"optimizer": "foreach", "precision": "bf16"}, Shape(items=3, length=100)),
        (S1, NARROW_S1, Shape(items=2)),
    ],
    ids=["f5", "f5 8-bit", "f5 bf16", "s1"],
)
def test_traced_peaks_are_the_allocators(kind, settings, shape, micro_batches):
    traced, measured = compare(kind, settings, shape, micro_batches)
    assert {phase: peak.without_scratch_bytes for phase, peak in measured.items()} == traced


@pytest.mark.parametrize("micro_batches", [1, 2])
def test_traced_peaks_of_a_generator_and_a_discriminator(micro_batches):
    """Autograd keeps the divisor of a division by a Python number: 8 bytes that a trace does not hold."""
    traced, measured = compare(Tiny, {}, Shape(items=2), micro_batches)
    divisions = 2 * 8 + 1
    for phase, peak in measured.items():
        assert 0 <= peak.without_scratch_bytes - traced[phase] <= 8 * divisions
