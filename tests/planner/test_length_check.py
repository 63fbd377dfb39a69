"""pytest tests/planner/test_length_check.py: a plan's windows of varied lengths, one after the other."""

from dataclasses import replace

import pytest

from memfit.device.hardware.catalogue import find_device, with_memory
from memfit.errors import InputError
from memfit.job import Shape
from memfit.plan import read_plan, write_plan
from memfit.planner.predict import assumed_lengths
from memfit.planner.request import PlanRequest
from memfit.planner.search.search import find_plan
from memfit.planner.variable_length.length_check import LengthCheck
from memfit.planner.variable_length.sequence import SequencePrediction, _within
from memfit.replay.allocator_config import AllocatorConfig
from memfit.replay.window_sequence import SequencePeaks
from memfit.trace.step import Tracing, trace_family
from testing.nets import JOBS, Transformer

GIB = 1 << 30


def peaks(reserved, failed=None):
    return SequencePeaks(
        windows=failed or 200, distinct_shapes=90, allocated_bytes=10 * GIB, allocated_window=0,
        reserved_bytes=reserved, reserved_window=9, growth=((0, reserved),), failed_window=failed,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("plain", "expandable", "fits", "allocator"),
    [(None, None, True, "default"), (40, None, True, "expandable_segments"), (40, 70, False, "default")],
)
def test_expandable_segments_are_taken_where_fragments_need_them(plain, expandable, fits, allocator):
    result = LengthCheck(
        sequence=SequencePrediction(plain=peaks(17 * GIB, plain), expandable=peaks(11 * GIB, expandable))
    )
    assert (result.fits, result.allocator) == (fits, allocator)
    (option,) = result.options()
    assert option.applied == (allocator != "default")
    assert option.saves == {"train": 6 * GIB}
    assert ("window 40" in result.reason()) == (plain is not None)


class Varying(JOBS["dit"]):
    def lengths(self):
        return [8 + 5 * i % 33 for i in range(60)]


def test_a_plan_says_what_its_first_windows_reserve():
    answer = find_plan(
        Varying(), PlanRequest(name="varying", global_batch=400, device=find_device("rtx4090"), micro_batch=200)
    )
    assert answer.lengths.sequence.plain.windows == 200
    assert answer.lengths.sequence.plain.failed_window is None
    assert answer.plan.allocator == "default"
    assert "200 windows" in answer.plan.reasons["varied lengths"]
    assert answer.lengths.sequence.plain.reserved_bytes >= answer.lengths.sequence.plain.allocated_bytes


def test_lengths_that_cannot_be_read_here_are_no_fault_of_the_plan():
    class Elsewhere(Varying):
        def lengths(self):
            raise FileNotFoundError("data.csv")

    answer = find_plan(
        Elsewhere(), PlanRequest(name="elsewhere", global_batch=400, device=find_device("rtx4090"), micro_batch=200)
    )
    assert (
        answer.plan.reasons["varied lengths"] == "not replayed: the job's lengths() raises FileNotFoundError: data.csv"
    )


@pytest.mark.parametrize(
    ("lengths", "asked", "words"),
    [
        ([-3, 4], {}, r"lengths\(\): sample 0: its length is -3; write .* one whole number above 0 for each sample"),
        (["long", "short"], {}, "not numbers"),
        ([4.5], {}, "its length is 4.5, not a whole number"),
        ([], {}, "no lengths: there is nothing to train on"),
        ([9, 90], {}, "sample 1 of length 90: longer than Wrong.longest, which is 50; write longest = 90 in the job"),
        (
            [9, 40],
            {"micro_batch": 30},
            "longer than the largest micro-batch, 30 frames; write --micro-batch 40 or more",
        ),
        ([9, 40], {"global_batch": 60, "devices": 2}, "write --global-batch 80 or more, in frames"),
    ],
)
def test_lengths_with_which_no_plan_could_run_are_refused_before_the_search(lengths, asked, words):
    class Wrong(JOBS["dit"]):
        unit, longest = "frames", 50

        def lengths(self):
            return lengths

    request = PlanRequest(
        name="wrong", device=with_memory(find_device("cpu"), 1 << 30), **{"global_batch": 400, **asked}
    )
    with pytest.raises(InputError, match=words):
        find_plan(Wrong(), request)


def test_the_allocator_of_a_plan_file_is_checked(tmp_path):
    plan = find_plan(
        JOBS["dit"](), PlanRequest(name="dit", global_batch=400, device=find_device("rtx4090"), micro_batch=200)
    ).plan
    write_plan(replace(plan, allocator="expandable_segments"), tmp_path / "plan.toml")
    assert read_plan(tmp_path / "plan.toml").allocator == "expandable_segments"
    text = (tmp_path / "plan.toml").read_text().replace("expandable_segments", "expandable")
    (tmp_path / "plan.toml").write_text(text)
    with pytest.raises(InputError, match=r"allocator = 'expandable'.*write expandable_segments"):
        read_plan(tmp_path / "plan.toml")


def test_a_limit_that_makes_the_allocator_return_its_cache_is_told_by_what_is_reserved_under_it():
    device = find_device("rtx4090")
    family = trace_family(Transformer(depth=1), Tracing(device=device, scratch=False), Shape(items=2, length=64))
    windows = [(Shape(items=32, length=length),) for length in (1024, 1096, 1200, 1296, 1400, 1496)]
    config = AllocatorConfig()
    free = _within(family, windows, None, config)
    limit = (free.allocated_bytes + free.reserved_bytes) // 2
    limited = _within(family, windows, limit, config)
    assert limited.failed_window is None
    assert limited.reserved_bytes <= limit < free.reserved_bytes
    none = _within(family, windows, free.allocated_bytes - (1 << 20), config)
    assert none.failed_window is not None
    assert none.reserved_bytes == free.reserved_bytes


def test_a_length_of_a_job_that_names_no_unit_for_it_is_not_counted_in_samples():
    class Unnamed(JOBS["dit"]):
        unit, longest = "samples", 50

        def lengths(self):
            return [9, 40]

    device = with_memory(find_device("cpu"), 1 << 30)
    words = (
        "longer than the largest micro-batch, 4 units of length; write --global-batch 40 or more, in units of length"
    )
    with pytest.raises(InputError, match=words):
        find_plan(Unnamed(), PlanRequest(name="unnamed", global_batch=4, device=device))
    assert assumed_lengths(Unnamed(), Shape(items=1, length=50)).startswith(
        "every sample is as long as the longest, 50 units of length;"
    )
