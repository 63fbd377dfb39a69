"""python -m pytest tests/jobs/test_builtin.py"""

import subprocess
import sys

import pytest

from memfit.jobs import BUILTIN
from memfit.loading import load_job

SPEECH = [name for name in BUILTIN if name.split("/")[0] in ("f5_tts", "e2_tts", "gpt_sovits")]


def test_names_are_known_without_torch():
    code = "import sys, memfit.jobs; print('torch' in sys.modules, len(memfit.jobs.BUILTIN))"
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert said == ["False", str(len(BUILTIN))]


@pytest.mark.parametrize("name", SPEECH)
def test_every_job_loads_and_names_its_levers(name):
    job = load_job(name)
    assert job.settings()
    assert {"micro_batch", "precision"} <= set(job.upstream)
    assert all(place.strip() for place in job.upstream.values())
