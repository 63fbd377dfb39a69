"""pytest tests/planner/test_stage_cuts.py: where a plan cuts nets into stages, by seconds and by memory."""

import json
from dataclasses import replace
from functools import partial
from itertools import pairwise

import numpy as np
import pytest
import torch
from torch import nn

from memfit.device.hardware.catalogue import find_device, with_memory
from memfit.engine.pipeline_cut import cut_into_stages
from memfit.geometry import shape_of, split
from memfit.installation import release_number
from memfit.job import Shape
from memfit.mesh import MeshShape
from memfit.plan import read_plan, write_plan
from memfit.planner.asked_job import AskedJob
from memfit.planner.pipeline.cut_search import around, traced_sizes
from memfit.planner.pipeline.module_costs import ModuleCosts, StateBytes
from memfit.planner.pipeline.pipeline_costs import PipelineCosts
from memfit.planner.pipeline.stage_model import StageModel
from memfit.planner.plan_json import plan_json
from memfit.planner.predict import predict
from memfit.planner.request import PlanRequest
from memfit.planner.search.search import find_plan
from memfit.torch_compat.pipelining import OLDEST
from memfit.trace.step import Tracing
from tests.engine.context_jobs import EncodedStages
from tests.engine.pipeline_jobs import Counted, Decoded, Stacked
from tests.planner.simulated_pipeline import simulated_1f1b

pytestmark = pytest.mark.skipif(
    release_number(torch.__version__) < OLDEST, reason="memfit refuses pp before torch 2.13"
)
CARD = replace(find_device("h100"), context_bytes=0, context_low=0, context_high=0)
TWO = MeshShape(pp=2)
WIDE = Decoded(width=1024, blocks=8, channels=32, ups=6)
GIB = 1 << 30


def model_of(job, items, modes=None, stages=2, device=CARD):
    costs = PipelineCosts(job, job.nets(), Tracing(device=device), Shape(items=items))
    return costs.model(MeshShape(pp=stages), stages, (Shape(items=items),), items, modes or {})


@pytest.mark.parametrize("items", [4, 64])
def test_the_cut_by_seconds_has_a_shorter_step_than_the_cut_by_operations(items):
    """The decoder at the end multiplies little and moves much: operations put it with too much, or too little."""
    model = model_of(WIDE, items)
    by_operations = cut_into_stages(WIDE, WIDE.nets(), 2, "pp=2").bounds
    by_seconds = model.bounds(8)
    assert by_seconds != by_operations
    steps = []
    for bounds in (by_seconds, by_operations):
        figures = model.figures(bounds)
        forward, backward = [f.forward_seconds for f in figures], [f.backward_seconds for f in figures]
        steps.append(simulated_1f1b(2, 8, forward, backward, 0.0))
    assert steps[0] < 0.95 * steps[1]


def test_every_operator_is_one_modules_or_every_stages():
    model = model_of(Counted(), 4)
    costs = model.costs
    whole = costs.common_seconds + costs.forward_seconds.sum() + costs.backward_seconds.sum()
    with_recomputing = model_of(Counted(), 4, {"net.blocks.1": "full"}).costs
    assert np.flatnonzero(with_recomputing.backward_seconds > 1.05 * costs.backward_seconds).tolist() == [2]
    assert np.flatnonzero(with_recomputing.kept_bytes < 0.5 * costs.kept_bytes).tolist() == [2]
    assert np.allclose(with_recomputing.forward_seconds, costs.forward_seconds)
    assert 0 < costs.common_seconds < 0.2 * whole, "the frozen net before the first module"
    assert costs.forward_seconds[-1] > costs.forward_seconds[1], "the head has the loss"
    parameters = sum(p.nbytes for p in Counted().nets()["net"].parameters())
    assert costs.state.parameters.sum() == costs.state.gradients.sum() == parameters
    assert costs.state.others.sum() == pytest.approx(3 * parameters, rel=0.01), "moments and average"


def test_what_modules_hold_is_what_a_stage_holds_between_micro_batches():
    """With Adam's moments and an average: of one rank, and of two that share a stage."""
    job = Counted()
    model = model_of(job, 4)
    bounds = (0, 4, 7)
    nets = job.nets()
    named = model.paths[:4]
    elements = sum(p.numel() for path in named for p in nets["net"].get_submodule(path[4:]).parameters())
    assert model.costs.state.held(1)[:4].sum() == pytest.approx(20 * elements, rel=0.01)
    assert model.costs.state.held(2)[:4].sum() == pytest.approx((8 + 16 / 2) * elements, rel=0.01)
    assert model.bytes_of(0, *bounds[:2], 4) - model.bytes_of(0, *bounds[:2], 2) == 0, "two are on their way"
    assert model.bytes_of(0, 0, 4, 1) < model.bytes_of(0, 0, 4, 2), "GPipe with one, and 1F1B with two"


def test_a_rank_of_a_sequence_keeps_its_part_and_stages_are_sharded_over_all_of_them():
    """What modules hold is that of whole nets, of which a part is on each rank."""
    job, shape = EncodedStages(precision="bf16"), Shape(items=64)
    costs = PipelineCosts(job, job.nets(), Tracing(device=CARD), shape)
    whole, part, sharded = (
        costs.model(mesh, 2, (shape,), 64, {}) for mesh in (TWO, MeshShape(pp=2, cp=2), MeshShape(pp=2, dp_shard=2))
    )
    for held in ("parameters", "gradients", "others"):
        mine, theirs = (getattr(model.costs.state, held) for model in (part, whole))
        assert mine == pytest.approx(theirs), held
    assert part.shards == sharded.shards == 2
    blocks = slice(2, 4)
    assert part.costs.kept_bytes[blocks] == pytest.approx(whole.costs.kept_bytes[blocks] / 2, rel=0.1)
    bounds = (0, 2, 5)
    assert part.bytes_of(0, *bounds[:2], 4) < sharded.bytes_of(0, *bounds[:2], 4)


def costs_of(seconds, kept, state=None):
    count = len(seconds)
    held = np.array(state or [0.0] * count)
    return ModuleCosts(
        units=1, common_seconds=0.0, forward_seconds=np.array(seconds) / 3, backward_seconds=np.array(seconds) * 2 / 3,
        kept_bytes=np.array(kept), state=StateBytes(parameters=held, gradients=0 * held, others=0 * held),
    )  # fmt: skip


def stages(costs, count, rest=(), allowed=lambda begin, end: True):
    paths = [f"net.{number}" for number in range(len(costs.kept_bytes))]
    return StageModel(paths=paths, costs=costs, stages=count, allowed=allowed, rest=rest)


def test_a_stage_that_does_not_fit_gives_modules_to_one_with_room_for_the_least_time():
    costs = costs_of([1.0, 1.0, 1.0, 1.0, 1.0, 1.0], [4.0, 4.0, 1.0, 1.0, 1.0, 1.0])
    model = stages(costs, 2)
    assert model.bounds(4) == (0, 3, 6), "equal seconds: 2 x 9 bytes and 3"
    assert model.bounds(4, 17) == (0, 2, 6), "one module fewer: 2 x 8 bytes and 4"
    assert model.bounds(4, 8.5) == (0, 1, 6)
    assert model.bounds(4, 1) == (0, 1, 6), "the one that exceeds it least"
    assert stages(costs, 2, [4.0, 0.0]).bounds(4, 17) == (0, 1, 6), "what the first stage has beside its modules"


def test_first_stages_have_more_micro_batches_on_their_way_and_gpipe_all():
    model = stages(costs_of([1.0] * 4, [1.0] * 4), 4)
    one_each = list(pairwise(range(5)))
    assert [model.bytes_of(stage, *each, 8) for stage, each in enumerate(one_each)] == [4, 3, 2, 1]
    assert [model.bytes_of(stage, *each, 3) for stage, each in enumerate(one_each)] == [3, 3, 3, 3]


def test_no_stage_is_without_trained_parameters_or_shares_one():
    class Tied(Stacked):
        """Its first and third block share a layer; nothing of the embedding is trained."""

        def __init__(self):
            super().__init__()
            self.embed.weight.requires_grad_(False)
            self.blocks[2].up = self.blocks[0].up

    class Shared(Counted):
        Net = Tied

    model = model_of(Shared(), 4)
    costs = replace(model.costs, forward_seconds=np.array([9.0, 0, 9, 0, 0, 0, 0]), backward_seconds=np.zeros(7))
    assert replace(model, costs=costs).bounds(4) == (0, 4, 7), "not (0, 1, 7) or (0, 2, 7)"
    assert cut_into_stages(Shared(), Shared().nets(), 2, "pp=2").bounds == (0, 4, 7)


def test_costs_between_two_traced_micro_batches_lie_on_their_line():
    small, large = costs_of([1.0, 2.0], [1.0, 4.0]), replace(costs_of([3.0, 2.0], [5.0, 4.0]), units=5)
    assert small.at(3, large).forward_seconds * 3 == pytest.approx([2.0, 2.0])
    assert small.at(3, large).kept_bytes.tolist() == [3.0, 4.0]
    assert small.at(2, small).kept_bytes.tolist() == [2.0, 8.0], "in proportion"
    ways = [split(512, micro, "samples") for micro in (512, 256, 128, 64, 32, 16, 8, 4, 2, 1)]
    sizes = traced_sizes(partial(shape_of, WIDE), ways)
    assert [shape.items for shape in sizes] == [1, 8, 64, 512]
    assert [shape.items for shape in around(sizes, 64)] == [8, 64]
    assert [shape.items for shape in around(sizes, 65)] == [64, 512]
    assert [shape.items for shape in around(sizes, 1)] == [1]


def planned(memory, **asked):
    request = PlanRequest(
        name="decoded", global_batch=16, micro_batch=8, device=with_memory(CARD, memory), mesh=TWO,
        keep=("checkpointing",), **asked,
    )  # fmt: skip
    return find_plan(WIDE, request)


def test_a_plan_moves_modules_where_the_balanced_cut_does_not_fit(tmp_path):
    """Blocks hold optimizer state and take little memory traffic; the decoder holds nothing and takes much."""
    roomy = planned(80 * GIB)
    balanced, needs = roomy.chosen.stages, [stage.process_bytes for stage in roomy.chosen.stages]
    tight = planned(max(needs) - (64 << 20))
    assert tight.plan is not None
    moved = tight.chosen.stages
    assert [stage.modules for stage in moved] != [stage.modules for stage in balanced]
    assert max(stage.process_bytes for stage in moved) <= tight.plan.budget_bytes < max(needs)
    assert tight.plan.step_seconds > roomy.plan.step_seconds
    assert tight.plan.engine_choices == {"first_modules": [stage.first_module for stage in moved]}
    write_plan(tight.plan, tmp_path / "plan.toml")
    assert read_plan(tmp_path / "plan.toml").engine_choices == tight.plan.engine_choices
    values = json.loads(json.dumps(plan_json(tight)))
    assert read_plan(tmp_path / "plan.toml").stages == values["stages"]
    assert [stage["modules"] for stage in values["stages"]] == [stage.modules for stage in moved]
    assert set(values["stages"][0]) == {
        "first_module", "last_module", "modules", "forward_seconds", "backward_seconds", "process_bytes"
    }  # fmt: skip
    assert f"stage 1 from {moved[1].first_module}: {moved[1].modules} modules" in tight.plan.reasons["stages"]


def test_a_plans_memory_is_that_of_its_own_cut():
    answer = planned(80 * GIB)
    plan = answer.plan
    again = predict(
        WIDE, "decoded", Shape(items=8), answer_device(plan), micro_batches=2, engine="fsdp2", world=2, mesh=TWO,
        checkpointing={}, engine_choices=plan.engine_choices, plan=plan,
    )  # fmt: skip
    assert max(phase.process_bytes for phase in again.footprint.phases.values()) == max(
        stage.process_bytes for stage in answer.chosen.stages
    )
    assert [stage.first_module for stage in again.stages] == plan.engine_choices["first_modules"]
    assert [stage.process_bytes for stage in again.stages] == [s.process_bytes for s in answer.chosen.stages]


@pytest.mark.parametrize(
    "schedule",
    [
        "interleaved_1f1b",
        pytest.param("gpipe", marks=pytest.mark.slow),
        pytest.param("interleaved_zero_bubble", marks=pytest.mark.slow),
    ],
)
def test_a_plans_memory_is_that_of_the_schedule_that_was_asked_for(schedule):
    """Within a budget that the cut has to respect, as every rank is traced."""
    request = PlanRequest(
        name="decoded", global_batch=32, micro_batch=4, device=with_memory(CARD, 80 * GIB), mesh=TWO,
        keep=("checkpointing",), engine_choices={"schedule": schedule},
    )  # fmt: skip
    roomy = find_plan(WIDE, request)
    plan, stages = roomy.plan, roomy.chosen.stages
    assert plan.engine_choices == {"schedule": schedule, "first_modules": [stage.first_module for stage in stages]}
    again = predict(
        WIDE, "decoded", Shape(items=4), answer_device(plan), micro_batches=8, engine="fsdp2", world=2, mesh=TWO,
        checkpointing={}, engine_choices=plan.engine_choices, plan=plan,
    )  # fmt: skip
    assert again.footprint.phases["train"].process_bytes == max(stage.process_bytes for stage in stages)
    assert [stage.process_bytes for stage in again.stages] == [stage.process_bytes for stage in stages]
    needs = max(stage.process_bytes for stage in stages)
    tight = find_plan(WIDE, replace(request, device=with_memory(CARD, needs - (64 << 20))))
    if tight.plan is not None:
        assert max(stage.process_bytes for stage in tight.chosen.stages) <= tight.plan.budget_bytes


def test_of_two_stages_on_each_rank_torchs_order_says_how_many_are_on_their_way_and_a_rank_holds_both():
    """Of rank 1 torch runs 1F0 1F1 3F0 3B0 3F1 3B1 1F2 1B0, or with backwards in two parts 1F0 1F1 3F0 3I0 3F1 3I1 3W0
    1F2 1I0 3W1 1F3 1I1 1W0."""
    costs = costs_of([1.0] * 4, [1.0] * 4)
    one_each, counts = (0, 1, 2, 3, 4), {}
    for schedule, count in (("1f1b", 4), ("interleaved_1f1b", 4), ("interleaved_zero_bubble", 4)):
        model = replace(stages(costs, count), schedule=schedule)
        counts[schedule] = [model.bytes_of(stage, stage, stage + 1, 8) for stage in range(4)]
    assert counts["1f1b"] == [4, 3, 2, 1]
    assert counts["interleaved_1f1b"] == [4, 3, 2, 1]
    assert counts["interleaved_zero_bubble"] == [4, 4, 2, 2], "what the backward of weights needs is held until then"
    interleaved = replace(stages(costs, 4, [0.5] * 4), schedule="interleaved_1f1b")
    assert interleaved.peak(one_each, 8) == 4 + 2 + 2 * 0.5


def answer_device(plan):
    return with_memory(CARD, plan.budget_bytes)


def test_a_prediction_is_cut_by_the_seconds_of_its_card_and_says_so():
    slow = replace(CARD, bandwidth=CARD.bandwidth / 30)
    with AskedJob("decoded", lambda: WIDE) as asked:
        cuts = {}
        for device in (CARD, slow):
            prediction = asked.predict(
                Shape(items=64), device, engine="fsdp2", world=2, mesh=TWO, micro_batches=4, checkpointing={}
            )
            cuts[device.bandwidth] = prediction.stages
            assert [stage.first_module for stage in prediction.stages] == [
                model_of(WIDE, 64, device=device).paths[bound]
                for bound in model_of(WIDE, 64, device=device).bounds(4)[:2]
            ]
            assert all(stage.process_bytes for stage in prediction.stages)
    assert cuts[CARD.bandwidth] != cuts[slow.bandwidth], "what was traced for the other card does not hold"


class Headed(Counted):
    """A wide embedding, which computes nothing, and a head that computes more than all blocks."""

    class Net(Counted.Net):
        def __init__(self):
            super().__init__(blocks=3)
            self.embed, self.head = nn.Embedding(32, 24), nn.Linear(48, 1 << 16)


def test_a_window_is_timed_on_the_stage_that_takes_most_time():
    figures = model_of(Headed(), 512, stages=3).figures((0, 2, 4, 5))
    assert max(figures, key=lambda stage: stage.seconds) is figures[2]
    request = PlanRequest(name="headed", global_batch=4096, micro_batch=512, device=CARD, mesh=MeshShape(pp=3))
    answer = find_plan(Headed(), request)
    slowest = max(stage.seconds for stage in answer.chosen.stages)
    assert 8 * slowest < answer.plan.step_seconds < 8 * slowest + 3 * sum(s.seconds for s in answer.chosen.stages)
