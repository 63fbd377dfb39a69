"""pytest tests/jobs/test_ranges.py: settings with which there is no job are refused in a line that says what may be."""

import pytest

from memfit.errors import InputError
from memfit.loading import built_in_jobs, load_job

WRONG = [
    ("latentsync/stage1", "frames", 0, "1 or more"),
    ("latentsync/stage2", "trepa_weight", -1, "0 or more"),
    ("musetalk/stage1", "frames", 0, "1 or more"),
    ("f5_tts/base", "dropout", 1.5, "0 to 1; write dropout=1"),
    ("gpt_sovits/s1", "clip_seconds", -1, "0.5 to 3600; write clip_seconds=0.5"),
    ("gpt_sovits/s2", "clip_seconds", 0, "0.5 to 3600"),
    ("gpt_sovits/s2_v3", "clip_seconds", 1e9, "0.5 to 3600; write clip_seconds=3600"),
]


@pytest.mark.parametrize(("job", "setting", "value", "words"), WRONG)
def test_a_setting_out_of_its_range_is_refused(job, setting, value, words):
    with pytest.raises(InputError, match=f"^{setting}={value}.*out of its range: {words}"):
        load_job(job, {setting: value})


def test_every_range_is_of_a_setting_and_holds_its_default():
    for name in built_in_jobs():
        job = load_job(name)
        assert set(job.ranges) <= set(job.setting_types())


def test_a_clip_must_hold_a_segment():
    with pytest.raises(InputError, match="a clip of 25 frames holds no segment of 32; write clip_seconds=1"):
        load_job("gpt_sovits/s2", {"clip_seconds": 0.5}).nets()
