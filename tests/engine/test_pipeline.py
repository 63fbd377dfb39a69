"""Stages of a pipeline: refusals by name, balanced cuts, and what a rank of a simulated group says.

python -m pytest tests/engine/test_pipeline.py
"""

import pytest
import torch

from memfit.device.hardware.catalogue import find_device
from memfit.engine.capabilities import engine_of
from memfit.engine.pipeline_cut import cut_into_stages, distinct_ranks, equal_shares
from memfit.errors import InputError
from memfit.events import ALLOCATE, CATEGORIES, FREE
from memfit.installation import release_number
from memfit.job import Shape
from memfit.mesh import MeshShape, parse_mesh
from memfit.torch_compat.pipelining import OLDEST, in_schedules
from memfit.trace.self_test import live_peaks
from memfit.trace.step import Tracing, trace_job
from tests.engine.pipeline_jobs import REFUSED, Counted, Stages, Torn, TornDTensor
from tests.engine.tensor_jobs import Adapted, Experts, Words

pytestmark = pytest.mark.skipif(
    release_number(torch.__version__) < OLDEST, reason="memfit refuses pp before torch 2.13"
)


def traced(job, rank, stages=2, device="cpu", shards=1, tensor=1, **how):
    return trace_job(
        job,
        Shape(items=4),
        Tracing(
            device=find_device(device),
            scratch=False,
            engine="fsdp2",
            world=stages * shards * tensor,
            rank=rank,
            mesh=MeshShape(pp=stages, dp_shard=shards, tp=tensor),
            **how,
        ),
    )


@pytest.mark.parametrize("kind", REFUSED, ids=lambda kind: kind.__name__)
def test_what_cannot_be_cut_is_refused_by_the_name_of_its_module(kind):
    said = []
    for rank in range(2):
        try:
            traced(kind(), rank)
        except InputError as error:
            said.append(str(error))
    assert said, "it is carried"
    assert all("\n" not in line for line in said)
    assert any(REFUSED[kind] in line for line in said), said


def test_shares_have_the_least_largest_cost_and_then_size():
    assert equal_shares([0, 5, 5, 5, 5, 0, 10], [9, 1, 1, 1, 1, 0, 9], 3) == (0, 3, 5, 7)
    assert equal_shares([1, 1, 1, 1], [1, 1, 1, 9], 2) == (0, 2, 4)
    assert equal_shares([0, 0, 0], [4, 1, 1], 2) == (0, 1, 3)
    assert equal_shares([3, 1], [1, 1], 2) == (0, 1, 2)


def test_a_net_of_transformers_is_cut_by_its_plan_inside_of_a_wrapper():
    cut = cut_into_stages(Adapted(), Adapted().nets(), 2, "pp=2")
    inside = "net.base_model.model"
    layers = [f"{inside}.model.layers.{i}" for i in range(2)]
    assert cut.paths == (f"{inside}.model.embed_tokens", *layers, f"{inside}.model.norm", f"{inside}.lm_head")


def test_nets_are_cut_by_their_operations():
    cut = cut_into_stages(Stages(), Stages().nets(), 2, "pp=2")
    assert cut.paths == ("net.embed", *(f"net.blocks.{i}" for i in range(5)), "net.head")
    assert cut.bounds == (0, 4, 7), "three blocks of 3456 multiplications a token, and two with the head of 1536"
    assert cut_into_stages(Words(), Words().nets(), 2, "pp=2").modules_of(1) == range(2, 5)


def test_stages_begin_with_the_modules_that_are_named():
    names = ["net.embed", "net.blocks.1"]
    cut = cut_into_stages(Stages(), Stages().nets(), 2, "pp=2", names)
    assert cut.bounds == (0, 2, 7)
    even, shifted = (
        [traced(Stages(), rank, micro_batches=4, engine_choices=choices) for rank in range(2)]
        for choices in ({}, {"first_modules": names})
    )
    optimizer = [[_category_bytes(trace)["optimizer"] for trace in traces] for traces in (even, shifted)]
    assert sum(optimizer[0]) == sum(optimizer[1])
    assert optimizer[1][0] < 0.5 * optimizer[0][0], "an embedding and a block in place of three"


@pytest.mark.parametrize(
    ("names", "said"),
    [
        (["net.embed"], "it names 1 modules, and there are 2 stages; name the first module of each stage"),
        (["net.embed", "net.blocks.7"], "'net.blocks.7' is none of the 7 modules that run one after the other; write"),
        (["net.blocks.0", "net.head"], "the first stage begins with net.blocks.0; write net.embed first"),
        (["net.embed", "net.embed"], "net.embed does not run after net.embed; name them in the order"),
        ("net.embed", "engine_choices.first_modules = 'net.embed': no list of modules; write their names in"),
        ([1, 2], "engine_choices.first_modules = [1, 2]: no list of modules"),
    ],
    ids=str,
)
def test_names_that_do_not_match_the_nets_are_refused_in_one_line(names, said):
    with pytest.raises(InputError) as raised:
        traced(Stages(), 0, engine_choices={"first_modules": names})
    assert said in str(raised.value)
    assert "\n" not in str(raised.value)


def test_mixtures_of_experts_in_single_precision_are_cut_by_their_operations():
    job = Experts()
    cut = cut_into_stages(job, job.nets(), 2, "pp=2")
    assert cut.bounds == (0, 2, 5), "a layer and the embedding; a layer, the norm and the head"
    assert "train" in live_peaks(traced(job, 1, micro_batches=2))


def test_of_stages_that_hold_the_same_modules_the_first_is_traced():
    class Deep(Counted):
        class Net(Counted.Net):
            def __init__(self):
                super().__init__(blocks=16)

    job = Deep()
    assert cut_into_stages(job, job.nets(), 8, "pp=8").bounds[1:-1] == tuple(range(3, 16, 2))
    assert distinct_ranks(job, job.nets(), 8) == (0, 1, 7)


@pytest.mark.parametrize("stage", range(2))
def test_fewer_micro_batches_are_on_their_way_under_1f1b(stage):
    peaks = {}
    for schedule in ("1f1b", "gpipe"):
        for count in (4, 8):
            trace = traced(Counted(), stage, micro_batches=count, engine_choices={"schedule": schedule})
            peaks[schedule, count] = trace
    peaks = {key: _train_peak(trace) for key, trace in peaks.items()}
    each = {schedule: (peaks[schedule, 8] - peaks[schedule, 4]) / 4 for schedule in ("1f1b", "gpipe")}
    assert each["gpipe"] > 4 * each["1f1b"] > 0, "buffers of what is received are there for all of them"


def _train_peak(trace):
    return live_peaks(trace)["train"]


def test_a_card_is_simulated_like_the_cpu():
    assert _train_peak(traced(Stages(), 0, device="h100", micro_batches=3)) > 0


def test_stages_are_carried_with_other_dimensions():
    sharded = ("dp_replicate=2,dp_shard=2", "dp_shard=2,tp=2", "dp_replicate=2,dp_shard=2,tp=2", "dp_shard=2,ep=2")
    replicas = ("dp_replicate=2", "dp_replicate=2,tp=2", "dp_replicate=2,ep=2")
    others = ("dp_shard=2", *replicas, "tp=2", "ep=2", *sharded)
    for mesh in ("pp=2", *(f"pp=2,{other}" for other in others)):
        assert engine_of(parse_mesh(mesh)) == "fsdp2"
    with pytest.raises(InputError, match="replicas of experts that tokens are sent to are carried only where they are"):
        engine_of(parse_mesh("dp_replicate=2,dp_shard_in_ep=2"))


def test_ranks_that_hold_parts_of_a_layer_hold_them_of_one_stage():
    whole, cut = (
        [_category_bytes(traced(Words(), rank * tensor, micro_batches=2, tensor=tensor)) for rank in range(2)]
        for tensor in (1, 2)
    )
    for stage in range(2):
        for category in ("parameters", "gradients", "optimizer"):
            assert 0.5 < cut[stage][category] / whole[stage][category] < 0.6, "norms are whole on both"


def test_layers_that_are_cut_between_modules_of_the_pipeline_are_refused_by_the_name_of_the_module():
    between = {"first_modules": ["net.0", "net.3"]}
    with pytest.raises(InputError) as raised:
        traced(Torn(), 0, tensor=2, engine_choices=between)
    said = str(raised.value)
    assert "module net.3 on pp: it is given (4, 6, 10), and on one device (4, 6, 20)" in said
    with pytest.raises(InputError, match=r"module net.3 on pp: it is given a DTensor"):
        traced(TornDTensor(), 0, tensor=2, engine_choices=between)


def test_tokens_that_are_divided_are_refused_on_stages():
    with pytest.raises(InputError, match=r"on the mesh pp=2,tp=2: stages of a pipeline .* all tokens"):
        traced(Words(), 0, tensor=2, engine_choices={"sequence_parallel": True})


def test_choices_of_a_pipeline_are_refused_on_sharded_nets_and_the_other_way_round():
    with pytest.raises(InputError, match="it is of a pipeline"):
        trace_job(
            Stages(), Shape(items=4),
            Tracing(device=find_device("cpu"), engine="fsdp2", world=2, engine_choices={"schedule": "gpipe"}),
        )  # fmt: skip
    names = {"first_modules": ["net.embed"]}
    with pytest.raises(InputError, match="it is of a pipeline"):
        trace_job(
            Stages(), Shape(items=4),
            Tracing(device=find_device("cpu"), engine="fsdp2", world=2, engine_choices=names),
        )  # fmt: skip
    with pytest.raises(InputError, match="it is of sharded nets"):
        traced(Stages(), 0, engine_choices={"half_gather": True})
    with pytest.raises(InputError, match="schedule scatters gradients once"):
        traced(Stages(), 0, shards=2, engine_choices={"sync_each_micro_batch": True})
    with pytest.raises(
        InputError, match="no such schedule; write 1f1b or gpipe or interleaved_1f1b or interleaved_zero"
    ):
        traced(Stages(), 0, engine_choices={"schedule": "dual pipe"})
    with pytest.raises(InputError, match="it has the last stage on the first rank"):
        traced(Stages(), 0, engine_choices={"schedule": "zbv_zero_bubble"})


def test_of_several_stages_a_rank_holds_every_other_one():
    class Deep(Counted):
        class Net(Counted.Net):
            def __init__(self):
                super().__init__(blocks=16)

    job = Deep()
    assert distinct_ranks(job, job.nets(), 4, "interleaved_1f1b") == (0, 1, 3)
    with pytest.raises(InputError, match="pp=4: the nets have 7 modules that run one after the other"):
        distinct_ranks(Counted(), Counted().nets(), 4, "interleaved_1f1b")


def test_more_micro_batches_are_on_their_way_where_stages_are_interleaved():
    peaks = {
        (schedule, count): _train_peak(traced(Counted(), 0, micro_batches=count, engine_choices={"schedule": schedule}))
        for schedule in ("1f1b", "interleaved_1f1b")
        for count in (2, 8)
    }
    assert peaks["interleaved_1f1b", 8] > peaks["1f1b", 8] > peaks["1f1b", 2]


def test_micro_batches_that_rounds_do_not_divide_are_two_schedules():
    assert in_schedules("interleaved_1f1b", 7, 2) == (6, 1)
    assert in_schedules("interleaved_zero_bubble", 7, 2) == (6, 1)
    assert in_schedules("interleaved_1f1b", 3, 2) == (3,), "one round"
    assert in_schedules("interleaved_1f1b", 8, 4) == (8,)
    assert in_schedules("1f1b", 7, 2) == (7,)


def test_sharded_stages_keep_parts_of_the_optimizers_state_and_whole_gradients_until_they_are_scattered():
    whole, parts = (traced(Counted(), 0, shards=shards, micro_batches=4) for shards in (1, 2))
    sizes = {name: _category_bytes(trace) for name, trace in (("whole", whole), ("parts", parts))}
    assert sizes["parts"]["optimizer"] == pytest.approx(sizes["whole"]["optimizer"] / 2, rel=0.01)
    assert sizes["whole"]["gradients"] <= sizes["parts"]["gradients"] <= 1.5 * sizes["whole"]["gradients"]
    assert sizes["parts"]["parameters"] == pytest.approx(1.5 * sizes["whole"]["parameters"], rel=0.01)


def _category_bytes(trace):
    """Bytes of each category that are there at once, at most."""
    at_most, now = dict.fromkeys(CATEGORIES, 0), dict.fromkeys(CATEGORIES, 0)
    for kind, storage in zip(trace.kind.tolist(), trace.storage.tolist(), strict=True):
        category = CATEGORIES[trace.category[storage]]
        now[category] += int(trace.nbytes[storage]) * {ALLOCATE: 1, FREE: -1}.get(kind, 0)
        at_most[category] = max(at_most[category], now[category])
    return at_most


def test_an_older_torch_is_refused_by_its_version(monkeypatch):
    monkeypatch.setattr("memfit.torch_compat.pipelining.OLDEST", (99, 0))
    with pytest.raises(InputError, match=r"pp on torch .*; install torch 2.13 or newer"):
        traced(Stages(), 0)


def test_a_torch_without_what_memfit_replaces_is_refused_by_the_name(monkeypatch):
    monkeypatch.setattr("memfit.torch_compat.pipelining._CLEAN_UP", "_cleaned")
    with pytest.raises(InputError, match=r"its PipelineStage has no _cleaned, which memfit replaces"):
        traced(Stages(), 0)
