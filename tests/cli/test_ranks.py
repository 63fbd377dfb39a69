"""memfit predict for one of many ranks.

python -m pytest tests/cli/test_ranks.py
"""

import json

import pytest

from tests.cli.asking import is_one_line

NETS = "testing/nets.py:Transformer"


def predicted(run, *words):
    return json.loads(run("predict", NETS, "--device", "rtx4090", "--json", *words)[1])


@pytest.fixture
def alone(run):
    return predicted(run)


def test_a_thousand_ranks_in_a_minute(run, alone):
    answer = predicted(run, "--engine", "fsdp2", "--world", "1024")
    assert answer["seconds"] < 60
    assert (answer["engine"], answer["world"], answer["rank"]) == ("fsdp2", 1024, 0)
    saved, undisturbed = answer["phases"]["save"]["categories"], alone["phases"]["save"]["categories"]
    assert saved["optimizer"] < undisturbed["optimizer"] / 50
    assert answer["phases"]["train"]["categories"]["communication"] > 0


def test_replicas_hold_everything_and_a_buffer_for_their_gradients(run, alone):
    answer = predicted(run, "--engine", "ddp", "--world", "2", "--rank", "1")
    assert answer["rank"] == 1
    assert answer["phases"]["save"]["categories"] == alone["phases"]["save"]["categories"]
    process = [
        item["phases"]["train"]["process_bytes"] - item["phases"]["train"]["reserved_bytes"] for item in (answer, alone)
    ]
    assert process[0] > process[1], "NCCL's buffers lie outside of the allocator"


def test_several_devices_are_plans_of_equal_ones(run):
    words = ("plan", "tests/verify/jobs.py:Sound", "--global-batch", "14", "--device", "t4", "--device", "l4")
    code, said, _ = run(*words, "--devices", "2")
    assert code == 0
    assert "Each line plans 2 equal devices of its name; a plan does not mix devices." in said
    assert "equal devices" not in run(*words)[1]


def test_a_rank_of_a_mesh_holds_what_its_shards_say_and_a_communicator_of_each_dimension(run, alone):
    hybrid = predicted(run, "--mesh", "dp_replicate=32,dp_shard=2")
    sharded = predicted(run, "--engine", "fsdp2", "--world", "2")
    assert (hybrid["engine"], hybrid["world"], hybrid["rank"]) == ("fsdp2", 64, 0)
    assert hybrid["mesh"] == {"dp_replicate": 32, "dp_shard": 2}
    assert "dp_shard 0" in hybrid["rank_reason"]
    for phase, peaks in sharded["phases"].items():
        assert hybrid["phases"][phase]["allocated_bytes"] == peaks["allocated_bytes"]
    outside = [
        answer["phases"]["train"]["process_bytes"] - answer["phases"]["train"]["reserved_bytes"]
        for answer in (alone, sharded, hybrid)
    ]
    assert outside[2] - outside[0] == 3 * (outside[1] - outside[0]) > 0


def test_one_rank_of_zero_is_predicted_and_holds_all_of_the_optimizer(run, alone):
    answer = predicted(run, "--engine", "zero2", "--world", "1")
    assert (answer["engine"], answer["world"], answer["rank"]) == ("zero2", 1, 0)
    saved, undisturbed = answer["phases"]["save"]["categories"], alone["phases"]["save"]["categories"]
    assert saved["optimizer"] >= undisturbed["optimizer"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--mesh", "dp_shard=2", "--world", "3"], "the mesh has 2 ranks"),
        (["--mesh", "dp_replicate=2,dp_shard=2", "--engine", "zero3"], "write --engine fsdp2"),
        (["--mesh", "dp_replicate=200,dp_shard=200"], "memfit simulates at most"),
        (["--world", "2"], "--engine single has one rank"),
        (["--engine", "ddp", "--world", "2", "--rank", "2"], "there are ranks 0 to 1"),
    ],
)
def test_ranks_that_are_not_there(run, words, said):
    is_one_line(run("predict", NETS, "--device", "rtx4090", *words), said)


@pytest.mark.parametrize("mesh", ["dp_shard=99999", "dp_shard=2,tp=50000"])
def test_a_plan_for_too_large_a_mesh_names_the_option_that_was_written(run, mesh):
    said = f"--mesh {mesh}: memfit simulates at most"
    is_one_line(run("plan", NETS, "--device", "rtx4090", "--global-batch", "8", "--mesh", mesh), said)
