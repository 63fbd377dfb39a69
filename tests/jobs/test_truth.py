"""What the speech jobs' traces say is what a CPU allocates: python -m pytest tests/jobs/test_truth.py"""

import pytest

from memfit.job import Shape
from memfit.jobs.f5_tts import F5Tiny
from memfit.jobs.gpt_sovits_s1 import S1
from memfit.jobs.gpt_sovits_s2 import GptSovitsTiny
from testing.truth import compare

F5_SHAPE = Shape(items=3, length=100)
NARROW_S1 = {"depth": 2, "dim": 64, "clip_seconds": 3.0, "precision": "fp32"}


@pytest.mark.parametrize(
    ("kind", "settings", "shape", "micro_batches"),
    [
        (F5Tiny, {}, F5_SHAPE, 1),
        pytest.param(F5Tiny, {}, F5_SHAPE, 2, marks=pytest.mark.slow),
        (F5Tiny, {"optimizer": "8bit", "draws": "step", "dropout": 0.1}, F5_SHAPE, 1),
        (F5Tiny, {"optimizer": "foreach", "precision": "bf16"}, F5_SHAPE, 2),
        (S1, NARROW_S1, Shape(items=2), 2),
        (GptSovitsTiny, {}, Shape(items=2), 1),
    ],
    ids=["f5", "f5 accumulated", "f5 8-bit", "f5 bf16 accumulated", "s1 accumulated", "s2"],
)
def test_traced_peaks_are_the_allocators(kind, settings, shape, micro_batches):
    traced, with_scratch, measured = compare(kind, settings, shape, micro_batches)
    assert {phase: peak.without_scratch_bytes for phase, peak in measured.items()} == traced
    for phase, peak in measured.items():
        assert with_scratch[phase] == pytest.approx(peak.allocated_bytes, rel=0.02)
