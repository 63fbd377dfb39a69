"""What sharded ranks that start again do with less."""

import dataclasses

import pytest

from memfit.plan import Plan
from memfit.train.folder import RunFolder
from memfit.train.less import AS_PLANNED, Less, read_less, write_less

PLAN = Plan(
    job="job.py:Job", settings={}, device="cpu", budget_bytes=1 << 20, unit="samples", global_batch=4, micro_batch=2,
    micro_batches=[[2, 2]], arithmetic="", engine="fsdp2", precision="fp32", seed=0,
)  # fmt: skip


def test_what_several_ranks_write_adds_up(tmp_path):
    folder = RunFolder(tmp_path)
    assert read_less(folder, PLAN) == AS_PLANNED
    for less in (Less(most=2, alone=(7,)), Less(most=4, left_out=(3,)), Less(alone=(1,), validations=2)):
        write_less(folder, PLAN, less)
    assert read_less(folder, PLAN) == Less(most=2, alone=(1, 7), left_out=(3,), validations=2)


def test_of_another_plan_it_says_nothing(tmp_path):
    folder = RunFolder(tmp_path)
    write_less(folder, PLAN, Less(most=1))
    assert read_less(folder, dataclasses.replace(PLAN, budget_bytes=2 << 20)) == AS_PLANNED


@pytest.mark.parametrize("text", ["", "[]", '{"planned": ["fsdp2", 2, 1048576], "most": 1}'])
def test_a_broken_file_says_nothing(tmp_path, text):
    (tmp_path / "less.json").write_text(text)
    assert read_less(RunFolder(tmp_path), PLAN) == AS_PLANNED
