"""DeepSpeed's ZeRO with real gloo processes: the same steps as one rank takes, and checkpoints for any engine.

python -m pytest tests/engine/test_zero.py
"""

import itertools
import math
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from memfit.engine.factory import CHOICES, check_choices
from memfit.engine.single import Single
from memfit.engine.zero_partition import boxes, most_gradients
from memfit.errors import InputError
from testing.rank_copies import run_ranks
from tests.engine.zero_ranks import CASES, READERS, loaded, train

ROOT = Path(__file__).parents[2]


def run(world, folder):
    run_ranks(world, "tests.engine.zero_ranks", [str(folder)], MEMFIT_COLLECTIVE_SECONDS="60")
    return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(world)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("ranks")


@pytest.fixture(scope="module")
def ranks(folder):
    return run(2, folder)


def held(weights, rank, engine):
    """What a rank has of these: an average that rank 0 keeps is nowhere else."""
    spread = rank == 0 or engine in ("zero3", "fsdp2")
    return {name: value for name, value in weights.items() if spread or not name.startswith("average of ")}


def same(result, expected):
    assert result.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(result[name], value, rtol=1e-5, atol=1e-7)


def compare(ranks, case):
    name, engine, choices = case
    alone = train(name)
    for rank, mine in enumerate(ranks):
        result = mine[(name, engine, *choices)]
        for theirs, ours in zip(result["numbers"], alone["numbers"], strict=True):
            assert theirs == pytest.approx(ours, rel=1e-5)
        same(result["weights"], held(alone["weights"], rank, engine))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_two_ranks_take_the_steps_of_one(ranks, case):
    compare(ranks, case)


@pytest.mark.parametrize("engine", ["zero1", "zero2", "zero3"])
def test_a_net_of_each_ranks_own_is_stepped_beside_deepspeed_as_beside_data_parallelism(ranks, engine):
    for mine in ranks:
        result, expected = mine["own judge", engine], mine["own judge", "ddp"]
        same(result["weights"], expected["weights"])
        assert result["numbers"] == [pytest.approx(numbers, rel=1e-5) for numbers in expected["numbers"]]
    first, second = (mine["own judge", engine]["weights"]["judge.0.weight"] for mine in ranks)
    assert not torch.equal(first, second)


def test_a_checkpoint_holds_rank_0s_own_nets(ranks):
    (first, _), (second, _) = (mine["restored"] for mine in ranks)
    assert not torch.equal(first["judge.0.weight"], second["judge.0.weight"])
    for mine in ranks:
        same(mine["restored"][1], first)


@pytest.mark.slow
def test_three_ranks_take_the_steps_of_one(tmp_path):
    ranks = run(3, tmp_path)
    for case in CASES:
        compare(ranks, case)


def test_what_is_averaged_is_compared(ranks):
    assert "average of net.out.weight" in ranks[1][("nets", "zero3", *CASES[-2][2])]["weights"]


@pytest.mark.parametrize("writer", READERS)
def test_every_engine_goes_on_with_what_any_wrote(ranks, folder, writer):
    expected = ranks[0]["saved", writer]
    for reader in READERS[writer]:
        for rank, mine in enumerate(ranks):
            same(mine["loaded", writer, reader], held(expected, rank, reader))
    same(loaded(Single(), folder / writer), expected)


def test_the_same_engine_goes_on_bit_for_bit(ranks):
    for engine in ("zero1", "zero2", "zero3"):
        answer, expected = ranks[0]["loaded", engine, engine], ranks[0]["saved", engine]
        assert all(torch.equal(answer[name], value) for name, value in expected.items()), engine


def test_what_cannot_be_carried_is_refused_by_name_and_with_the_engine_to_use(ranks):
    for stage, engine in ((1, "zero1"), (2, "zero2"), (3, "zero3")):
        said = ranks[1]["refusals"][engine]
        assert said["Gan"].startswith(f"optimizers generator, judge on --engine {engine}")
        assert "its backward reaches parameter generator.weight" in said["Reaching"]
        assert "optimizer 'net'" in said["OwnStep"]
        assert "parameter net.0.weight" in said["Halves"]
        assert "precision=fp16" in said["Scaled"]
        assert "parameter net.unused" in said["Decayed"]
        assert ("Late" in said) == (stage == 3)
        assert all(
            f"--engine {engine}" in line and "write" in line and line.count("--engine") > 1 for line in said.values()
        )


@pytest.mark.parametrize("shape", [(), (7,), (3, 4), (2, 3, 4), (2, 1, 3, 2)])
def test_a_run_of_elements_is_boxes_in_its_order(shape):
    complete = torch.arange(math.prod(shape)).view(shape)
    for start, stop in itertools.combinations(range(complete.numel() + 1), 2):
        parts = list(boxes(shape, start, stop))
        cut = [complete[tuple(slice(o, o + s) for o, s in zip(*box, strict=True))].reshape(-1) for box in parts]
        assert torch.cat(cut).tolist() == list(range(start, stop))
        assert len(parts) <= max(2 * len(shape) - 1, 1)


@pytest.mark.parametrize(
    ("engine", "choices", "said"),
    [
        ("single", {"overlap_comm": True}, "engine single has no such choice"),
        ("zero1", {"offload_param": True}, "engine zero1 has no such choice"),
        ("zero2", {"reduce_bucket": 1}, "write reduce_bucket_size"),
        ("zero2", {"reduce_bucket_size": 0}, "1 or more"),
        ("zero2", {"allgather_bucket_size": 33}, "even"),
        ("zero3", {"overlap_comm": 1}, "neither true nor false"),
        ("zero3", {"prefetch_bucket_size": True}, "no such number of elements"),
    ],
)
def test_a_choice_that_an_engine_does_not_have_is_refused_by_name(engine, choices, said):
    with pytest.raises(InputError, match=said) as raised:
        check_choices(engine, choices)
    assert f"engine_choices.{next(iter(choices))}" in str(raised.value)


def test_every_choice_of_an_engine_is_one_that_it_takes():
    from dataclasses import fields

    from memfit.engine.deepspeed import Choices
    from memfit.engine.pipeline import Pipeline

    names = {field.name for field in fields(Choices)}
    assert {key for stage in (1, 2, 3) for key in CHOICES[f"zero{stage}"]} == names
    assert set(CHOICES["fsdp2"]) <= {field.name for field in fields(Pipeline)}


@pytest.mark.parametrize(
    ("groups", "world", "rank"),
    [([[4, 4, 4, 4]], 2, 0), ([[2, 10, 4]], 2, 1), ([[1, 1, 30]], 4, 0), ([[8], [2, 10, 4]], 2, 1), ([[5]], 1, 0)],
)
def test_the_rank_with_the_most_gradients_keeps_each_that_enters_its_part(groups, world, rank):
    assert most_gradients(groups, world) == rank


_COUNTS_FOLDERS = """
import tempfile
made, make = [], tempfile.mkdtemp
tempfile.mkdtemp = lambda *args, **kwargs: made.append(make(*args, **kwargs)) or made[-1]
from memfit.engine.deepspeed import load
load()
assert not made, made
"""


def test_deepspeed_is_loaded_without_runs_of_a_compiler_and_their_temporary_files():
    done = subprocess.run(
        [sys.executable, "-c", _COUNTS_FOLDERS], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
