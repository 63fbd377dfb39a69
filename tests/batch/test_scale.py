"""pytest -m slow tests/batch/test_scale.py: time and memory of planning a million and ten million samples."""

import subprocess
import sys

import pytest

PLAN = """
import resource, sys, time
import numpy as np
from memfit.batch import LengthBatchSampler
lengths = (np.clip(np.random.default_rng(0).lognormal(1.6, 0.7, int(sys.argv[1])), 0.3, 30) * 93.75).astype(np.int32)
begin = time.process_time()
sampler = LengthBatchSampler(lengths, 38_400, rank=3, world=8)
assert len(sampler)
print(time.process_time() - begin, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)
"""


@pytest.mark.slow
@pytest.mark.parametrize(("samples", "seconds"), [(1_000_000, 0.3), (10_000_000, 3.0)])
def test_an_epoch_is_planned_in_time_and_within_a_gibibyte(samples, seconds) -> None:
    done = subprocess.run([sys.executable, "-c", PLAN, str(samples)], capture_output=True, text=True, check=True)
    took, mebibytes = map(float, done.stdout.split())
    assert took <= seconds
    assert mebibytes <= 1024
