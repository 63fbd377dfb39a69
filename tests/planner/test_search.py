"""The joint search: exact global batches, the faster of two ways, what is kept, and what is said where nothing fits.

python -m pytest tests/planner/test_search.py
"""

import io
import os
from dataclasses import replace
from typing import ClassVar

import pytest
import torch
from rich.console import Console
from torch import nn

import memfit
from bench.planner import peak_of
from memfit.device.hardware.catalogue import find_device, with_memory
from memfit.errors import InputError
from memfit.plan import read_plan, write_plan
from memfit.planner.cpu_margin import budget_for, without_cpu_margin
from memfit.planner.lr_scaling import learning_rate
from memfit.planner.predict import predict
from memfit.planner.request import PlanRequest
from memfit.planner.search import search as search_module
from memfit.planner.search.batch_splits import sizes
from memfit.planner.search.candidate_search import CandidateSearch
from memfit.planner.search.search import find_plan
from memfit.planner.search.traced_job import open_traced_job
from memfit.planner.suggestions.larger_hardware import larger_hardware
from memfit.planner.suggestions.smaller_settings import smaller_settings
from memfit.show.plan_table import show_answer
from memfit.sizes import parse_size
from memfit.trace.step import Tracing
from memfit.work_stages import begin_stage, stages_heard
from testing.large_nets import Dit
from testing.linear_layer import LinearLayer

CARD = replace(find_device("a100-40gb"), context_bytes=0, context_low=0, context_high=0)
JOB = Dit(dim=64, depth=8, heads=4, frames=512)


def card(mib: int):
    return with_memory(CARD, mib << 20)


@pytest.mark.parametrize(
    ("share", "expected"),
    [(64, (64, 32, 22, 16, 13, 11, 10, 8, 7)), (1, (1,)), (7, (7, 4, 3, 2, 1))],
)
def test_micro_batches_split_a_share_evenly(share, expected):
    result = sizes(share, 1, None)
    assert tuple(result[: len(expected)]) == expected
    assert result[-1] == 1
    assert result == sorted(set(result), reverse=True)
    assert sizes(share, 1, 3) == [min(3, share)]


def test_a_micro_batch_holds_the_longest_item():
    assert sizes(6000, 282, None)[-1] == 282
    assert min(sizes(100, 282, None)) == 100


def test_a_search_says_which_stage_begins():
    stages = []
    with stages_heard(stages.append):
        find_plan(LinearLayer(), PlanRequest(name="linear", device=card(4096), global_batch=8))
    begin_stage("nobody hears this")
    assert stages[0] == "trying micro-batches under single"
    assert stages[1] == "tracing what other options would save"
    assert stages[2].startswith("tracing all of 8 = ")


@pytest.fixture(scope="module")
def tight():
    """A plan that has to recompute: a micro-batch of four is asked for, and everything kept would take more."""
    return find_plan(
        JOB, PlanRequest(name="testing/large_nets.py:Dit", global_batch=10, device=card(100), micro_batch=4)
    )


def test_a_tight_budget_recomputes_and_the_prediction_of_the_plan_agrees(tight, tmp_path):
    plan = tight.plan
    assert plan is not None
    assert plan.arithmetic == "10 = 2 x 4 + 2 on 1 device"
    assert set(plan.checkpointing.values()) <= {"full", "selective", "offload"}
    assert plan.checkpointing
    write_plan(plan, tmp_path / "plan.toml")
    read = read_plan(tmp_path / "plan.toml")
    known = {key: value for key, value in plan.settings.items() if value is not None}
    assert read == replace(plan, settings=known, job_folder=os.getcwd())
    again = predict(
        JOB, "dit", shape=tight_shape(), device=card(100), micro_batches=3, checkpointing=read.checkpointing, plan=read
    )
    assert again.footprint.phases["train"].allocated_bytes == plan.phases["train"]["allocated_bytes"]
    option = next(option for option in plan.options if option.name.startswith("checkpointing"))
    assert option.applied
    assert option.saves["train"] > 0
    assert option.seconds is not None
    assert not option.changes_learning


def tight_shape():
    from memfit.job import Shape

    return Shape(items=4)


class NothingToRecompute(memfit.Job):
    """A net without repeated blocks."""

    def nets(self):
        return {"net": nn.Sequential(nn.Linear(64, 512), nn.GELU(), nn.Linear(512, 64))}

    def optimizers(self, nets):
        return {"sgd": torch.optim.SGD(nets["net"].parameters(), lr=0.1)}

    def batch(self, shape):
        return torch.randn(shape.items, 1024, 64)

    def loss(self, nets, batch):
        return nets["net"](batch).square().sum(), len(batch)


def test_a_net_without_blocks_is_planned_by_its_micro_batches():
    plan = find_plan(NothingToRecompute(), PlanRequest(name="", global_batch=22, device=card(64))).plan
    assert plan is not None
    assert (sum(plan.micro_batches[0]), plan.checkpointing) == (22, {})
    assert 1 < len(plan.micro_batches[0]) < 22


def test_what_stays_as_the_job_has_it_is_not_touched():
    planned = find_plan(
        JOB,
        PlanRequest(name="dit", global_batch=4, device=card(4096), keep=("checkpointing", "optimizer", "validation")),
    )
    assert planned.plan is not None
    assert planned.plan.checkpointing == {}
    assert planned.plan.implementation == "job"
    with pytest.raises(InputError, match="no such choice"):
        find_plan(JOB, PlanRequest(name="dit", global_batch=4, device=card(4096), keep=("sharding",)))
    with pytest.raises(InputError, match="forbids"):
        find_plan(
            JOB, PlanRequest(name="dit", global_batch=4, device=card(4096), keep=("precision",), allow=("precision",))
        )


def test_a_choice_that_was_asked_for_has_that_as_its_reason(tight):
    assert tight.plan.reasons["micro_batch"] == "--micro-batch sets it"


def test_a_plan_for_a_cpu_says_what_of_the_budget_is_left():
    cpu = with_memory(find_device("cpu"), 400 << 20)
    console = Console(file=io.StringIO(), width=200)
    show_answer(find_plan(JOB, PlanRequest(name="dit", global_batch=2, device=cpu)), cpu, None, console)
    assert "32.0 MiB of the 400 MiB are reserved" in console.file.getvalue()


def test_where_nothing_fits_the_smallest_need_is_given():
    planned = find_plan(
        Dit(dim=64, depth=2, heads=4, frames=4096), PlanRequest(name="dit", global_batch=2, device=card(8))
    )
    assert planned.plan is None
    assert planned.floor.footprint.headroom_bytes < 0
    assert planned.floor.geometry.micro_batch == 1
    assert sum(planned.floor.footprint.phases["train"].categories.values()) > 0


class WithSmallerSetting(Dit):
    smaller_settings: ClassVar = {"depth": "fewer blocks"}


def test_a_setting_that_is_not_enough_is_not_recommended():
    planned = find_plan(
        WithSmallerSetting(dim=64, depth=2, heads=4, frames=4096),
        PlanRequest(name="dit", global_batch=2, device=card(8)),
    )
    assert [(smaller.setting, smaller.value, smaller.fits) for smaller in planned.smaller_settings] == [
        ("depth", 1, False)
    ]
    console = Console(file=io.StringIO(), width=200)
    show_answer(planned, card(8), None, console)
    assert "None of them is enough alone" in console.file.getvalue()
    assert "write --set" not in console.file.getvalue()


def test_suggestions_are_traced_once_and_not_for_each_engine(monkeypatch):
    traced = []

    def count(job, how, device):
        traced.append(how.engine)
        return smaller_settings(job, how, device)

    monkeypatch.setattr(search_module, "smaller_settings", count)
    request = PlanRequest(name="dit", global_batch=4, device=card(8), devices=2)
    planned = find_plan(WithSmallerSetting(dim=64, depth=2, heads=4, frames=4096), request)
    assert planned.plan is None
    assert traced == [planned.floor.engine]
    assert planned.smaller_settings
    assert planned.larger_hardware


def test_a_smaller_setting_that_is_no_setting_is_refused_by_name():
    job = type("Misspelt", (Dit,), {"smaller_settings": {"dims": "a narrower net"}})(
        dim=64, depth=2, heads=4, frames=64
    )
    with pytest.raises(
        InputError, match=r"Misspelt.smaller_settings: 'dims': no setting of the job has that name; .*\bdim\b"
    ):
        smaller_settings(job, Tracing(device=card(8)), card(8))


def test_what_else_would_get_under_the_floor_is_told(tight):
    answer, small = tight.floor.footprint, card(100)
    parts = answer.phases["train"].categories
    shared = parts["parameters"] + parts["gradients"] + parts["optimizer"] + parts["ema"]
    alone = Tracing(device=small)
    for over, ranks in ((shared // 2, 2), (shared // 2 + 2, 4), (shared - shared // 16, 16)):
        ways = larger_hardware(replace(answer, limiting_phase="train", headroom_bytes=-over), "fp32", small, alone)
        assert f"shard over {ranks} devices" in ways[0]
    ways = larger_hardware(replace(answer, limiting_phase="train", headroom_bytes=-shared), "bf16", small, alone)
    assert len(ways) == 1
    assert "--device rtx4060" in ways[0]


def test_the_budget_suggested_for_a_cpu_leaves_what_the_tensors_need(tight):
    answer, host = tight.floor.footprint, with_memory(find_device("cpu"), 1 << 20)
    needs = max(phase.process_bytes for phase in answer.phases.values())
    enough = budget_for(needs, host)
    left = [without_cpu_margin(with_memory(host, nbytes)).usable_bytes for nbytes in (enough, enough - 2)]
    assert (left[0] >= needs, left[1] < needs) == (True, True)
    suggested = parse_size(
        larger_hardware(answer, "bf16", host, Tracing(device=host))[-1]
        .removeprefix("use --memory ")
        .partition(" or more")[0]
    )
    assert enough <= suggested < enough + (1 << 20)


def test_blocks_wait_on_the_host_where_recomputing_is_not_enough():
    roomy = card(4096)
    with open_traced_job(JOB, Tracing(device=roomy), tight_shape()) as fitting:
        blocks = fitting.blocks(tight_shape(), accumulated=True)
        moved = peak_of(fitting.trace(tight_shape(), dict.fromkeys(blocks, "offload"), accumulated=True))
        recomputed = peak_of(fitting.trace(tight_shape(), dict.fromkeys(blocks, "full"), accumulated=True))
        chosen = fitting.select(tight_shape(), moved, peak_of, accumulated=True)
    assert moved < recomputed
    assert chosen.peak <= moved
    assert "offload" in chosen.modes.values()


def test_the_operators_of_the_first_unit_count():
    with open_traced_job(JOB, Tracing(device=card(4096)), tight_shape()) as fitting:
        layout = fitting.observed(tight_shape(), accumulated=True).layout
        operators = fitting._forward_operators(fitting.kept(tight_shape(), accumulated=True), layout)
    assert len(operators) == len(layout.units)
    assert operators[0] > 0


def test_every_option_has_its_four_facts(tight):
    options = {option.name: option for option in tight.plan.options}
    assert {
        "no DDP for one device", "gradients as bucket views", "accumulation", "offload of saved activations",
        "optimizer state on the host", "8-bit optimizer", "sharding", "bf16 autocast",
    } <= options.keys()  # fmt: skip
    for option in options.values():
        assert option.costs
        assert option.reason
        assert option.saves_bytes == max(option.saves.values(), default=0)
        assert option.changes_learning == (option.name in ("8-bit optimizer", "bf16 autocast"))


def test_a_larger_micro_batch_takes_less_than_its_share_of_the_time():
    with open_traced_job(JOB, Tracing(device=card(4096)), tight_shape()) as fitting:
        drafts = CandidateSearch(fitting, card(4096), 32, 1)
        drafts._kept_seconds = {1: 1.0, 4: 2.5}
        assert drafts.kept_seconds(2) == pytest.approx(1.5)
        assert drafts.kept_seconds(16) == pytest.approx(8.5)


def test_candidates_come_in_the_order_of_their_estimates_and_only_the_first_are_estimated():
    device = card(64)
    with open_traced_job(JOB, Tracing(device=device), tight_shape()) as fitting:
        search = CandidateSearch(fitting, device, 64, 1)
        search._measure(next(geometry for geometry in search.geometries if geometry.micro_batch == 4))
        every = [search.estimate(geometry) for geometry in search.geometries]
        assert all(search.bound(each.geometry) <= each.rank for each in every if each.fits)
        expected = sorted((each for each in every if each.fits), key=lambda each: each.rank)
        assert [each.geometry.micro_batch for each in search.ranked(search.geometries)] == [
            each.geometry.micro_batch for each in expected
        ]
        assert 3 < len(expected) <= len(every)
        search._estimates.clear()
        assert next(search.ranked(search.geometries)) == expected[0]
        assert len(search._estimates) < len(expected)


@pytest.mark.parametrize(("rule", "factor"), [("none", 1.0), ("linear", 4.0), ("sqrt", 2.0)])
def test_learning_rates_follow_only_when_asked(rule, factor):
    result = learning_rate(16, 64, rule)
    assert result.factor == factor
    assert result.rules == {"none": 1.0, "linear": 4.0, "sqrt": 2.0}
    assert (result.warmup_windows > 0) == (rule != "none")


def test_a_rule_without_a_batch_to_start_from_is_refused():
    assert learning_rate(None, 64).factor == 1.0
    with pytest.raises(InputError, match="--tuned-for N"):
        learning_rate(None, 64, "linear")
    with pytest.raises(InputError, match="no such rule"):
        learning_rate(16, 64, "cubic")


def test_a_later_micro_batch_finds_gradients_though_the_job_frees_them_after_the_first_forward():
    late = type("Late", (Dit,), {"zero_grad": "after_forward", "__annotations__": {}})
    job = late(dim=64, depth=2, heads=4, frames=64)
    peaks = {}
    for item in (job, Dit(dim=64, depth=2, heads=4, frames=64)):
        with open_traced_job(item, Tracing(device=card(4096)), tight_shape()) as fitting:
            drafts = CandidateSearch(fitting, card(4096), 8, 1)
            peaks[type(item)] = drafts.peak_of(fitting.trace(tight_shape(), {}, accumulated=True))
    assert len(set(peaks.values())) == 1
