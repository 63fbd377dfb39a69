"""What sharded ranks that start again do with less."""

import dataclasses
import resource

import pytest

from memfit.plan import Plan
from memfit.train.recovery.reduced_limits import (
    NO_REDUCTION,
    ReducedLimits,
    forget_earlier_stop,
    read_reduced_limits,
    write_reduced_limits,
)
from memfit.train.run_folder import CannotWriteError, RunFolder

PLAN = Plan(
    job="job.py:Job", settings={}, device="cpu", budget_bytes=1 << 20, unit="samples", global_batch=4, micro_batch=2,
    micro_batches=[[2, 2]], arithmetic="", engine="fsdp2", precision="fp32", seed=0,
)  # fmt: skip


def test_what_several_ranks_write_adds_up(tmp_path):
    folder = RunFolder(tmp_path)
    assert read_reduced_limits(folder, PLAN) == NO_REDUCTION
    for limits in (
        ReducedLimits(most=2, alone=(7,)),
        ReducedLimits(most=4, left_out=(3,)),
        ReducedLimits(alone=(1,), validations=2),
    ):
        write_reduced_limits(folder, PLAN, limits)
    assert read_reduced_limits(folder, PLAN) == ReducedLimits(most=2, alone=(1, 7), left_out=(3,), validations=2)


def test_of_another_plan_it_says_nothing(tmp_path):
    folder = RunFolder(tmp_path)
    write_reduced_limits(folder, PLAN, ReducedLimits(most=1))
    assert read_reduced_limits(folder, dataclasses.replace(PLAN, budget_bytes=2 << 20)) == NO_REDUCTION


@pytest.mark.parametrize("text", ["", "[]", '{"planned": ["fsdp2", 2, 1048576], "most": 1}'])
def test_a_broken_file_says_nothing(tmp_path, text):
    (tmp_path / "reduced_limits.json").write_text(text)
    assert read_reduced_limits(RunFolder(tmp_path), PLAN) == NO_REDUCTION


def test_a_stop_counts_in_its_own_launch_alone(tmp_path, monkeypatch):
    folder = RunFolder(tmp_path)
    write_reduced_limits(folder, PLAN, ReducedLimits(stops_before=9, reason="no room", code=2))
    assert read_reduced_limits(folder, PLAN) == NO_REDUCTION
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    write_reduced_limits(folder, PLAN, ReducedLimits(most=1))
    limits = read_reduced_limits(folder, PLAN)
    assert (limits.most, limits.stops_before, limits.reason, limits.code) == (1, 9, "no room", 2)
    write_reduced_limits(folder, PLAN, ReducedLimits(stops_before=7, reason="less room"))
    assert read_reduced_limits(folder, PLAN).stops_before == 7


def test_a_launch_whose_ranks_start_again_does_not_stop_where_an_earlier_one_did(tmp_path, monkeypatch):
    folder = RunFolder(tmp_path)
    write_reduced_limits(folder, PLAN, ReducedLimits(most=2, stops_before=9, reason="no room", validates=False))
    forget_earlier_stop(folder, PLAN)
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    assert read_reduced_limits(folder, PLAN) == ReducedLimits(most=2)
    write_reduced_limits(folder, PLAN, ReducedLimits(validates=False))
    forget_earlier_stop(folder, PLAN)
    assert read_reduced_limits(folder, PLAN) == ReducedLimits(most=2, validates=False)


def test_a_disk_that_is_full_is_one_line(tmp_path):
    """A limit of a file's size stands for the disk."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1, limits[1]))
    try:
        with pytest.raises(CannotWriteError, match=r"reduced_limits\.json cannot be written"):
            write_reduced_limits(RunFolder(tmp_path), PLAN, ReducedLimits(most=1))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_is_gone_is_one_line(tmp_path):
    with pytest.raises(CannotWriteError, match="gone was removed, moved or replaced"):
        write_reduced_limits(RunFolder(tmp_path / "gone"), PLAN, ReducedLimits(most=1))
