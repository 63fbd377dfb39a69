"""FSDP2 with real gloo processes: the same steps as one rank takes, whatever is tied, unused or idle.

python -m pytest tests/engine/test_fsdp2.py
"""

import pytest
import torch

from testing.rank_copies import run_ranks
from tests.engine.rank_steps import CASES, Tied, train


def run(world, folder):
    run_ranks(world, "tests.engine.rank_steps", [str(folder)], MEMFIT_COLLECTIVE_SECONDS="60")
    return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(world)]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    return run(3, tmp_path_factory.mktemp("ranks"))


def compare(ranks, case):
    alone = train(case, None)
    for mine in ranks:
        for theirs, ours in zip(mine[case]["numbers"], alone["numbers"], strict=True):
            assert theirs == pytest.approx(ours, rel=1e-5)
        for name, value in alone["weights"].items():
            torch.testing.assert_close(mine[case]["weights"][name], value, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("case", CASES)
def test_three_ranks_take_the_steps_of_one(ranks, case):
    compare(ranks, case)


@pytest.mark.slow
def test_two_ranks_take_the_steps_of_one(tmp_path):
    ranks = run(2, tmp_path)
    for case in CASES:
        compare(ranks, case)


def test_a_parameter_that_no_rank_uses_is_not_decayed(ranks):
    assert torch.equal(ranks[0]["late units"]["weights"]["net.unused"], torch.ones(3))


def test_what_cannot_be_carried_is_refused_by_name_and_with_the_engine_to_use(ranks):
    optimizer, apart, outside = ranks[1]["refusals"]
    assert "optimizer 'net'" in optimizer
    assert "Own" in optimizer
    assert "judge" in apart
    assert "outside of the forward of a module that holds it" in outside
    assert all("--engine ddp" in said for said in (optimizer, apart, outside))


def test_a_block_that_shares_a_parameter_is_not_gathered_alone():
    from memfit.engine.sharded_units import units

    assert units(Tied()) == ["blocks.2", "blocks.1", ""]
