"""Names of memory-saving options: plan files and plan JSON use ``options``; the earlier ``levers`` is still read.

python -m pytest tests/planner/test_plan_names.py
"""

import re

import pytest

from memfit.device.hardware.catalogue import find_device
from memfit.errors import InputError
from memfit.job import Job
from memfit.plan import MemoryOption, Plan, read_plan, write_plan
from memfit.planner.request import PlanRequest

OPTION = MemoryOption(name="fused optimizer", applied=True, saves_bytes=7, costs="nothing", reason="why")
PLAN = Plan(
    job="job", settings={}, device="cpu", budget_bytes=1 << 30, unit="samples", global_batch=2, micro_batch=2,
    micro_batches=[[2]], arithmetic="2 = 1 x 2", engine="single", precision="fp32", seed=0, options=[OPTION],
)  # fmt: skip


def test_a_plan_file_of_an_earlier_version_reads_as_today_s(tmp_path):
    path = tmp_path / "plan.toml"
    write_plan(PLAN, path)
    text = path.read_text()
    assert "[[options]]" in text
    assert "applied = true" in text
    assert not re.search("lever|taken", text)
    path.write_text(text.replace("options", "levers").replace("applied = ", "taken = "))
    assert read_plan(path) == PLAN


def test_a_plan_file_with_both_names_is_refused(tmp_path):
    path = tmp_path / "plan.toml"
    write_plan(PLAN, path)
    path.write_text(path.read_text() + '[[levers]]\nname = "x"\n')
    with pytest.raises(InputError, match="levers: no such key"):
        read_plan(path)


def test_the_earlier_name_of_validation_options_is_refused_with_the_line_to_write():
    with pytest.raises(InputError, match="write validation_options = "):
        type("Earlier", (Job,), {"validation_levers": {"sliced": {}}})


@pytest.mark.parametrize(
    ("choices", "message"),
    [
        ({"keep": ("sharding",)}, "no such choice"),
        ({"allow": ("everything",)}, "no such choice"),
        ({"keep": ("precision",), "allow": ("precision",)}, "forbids"),
        ({"micro_batch": 5}, "more than the global batch of 4"),
    ],
)
def test_a_request_is_checked_before_anything_is_traced(choices, message):
    with pytest.raises(InputError, match=message):
        PlanRequest(name="job", global_batch=4, device=find_device("rtx4090"), **choices)
