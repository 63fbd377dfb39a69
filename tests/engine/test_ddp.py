"""DDP with three real gloo processes: the same steps as one rank takes, and failures that all ranks agree on.

python -m pytest tests/engine/test_ddp.py
"""

import pytest
import torch

from testing.rank_copies import run_ranks
from tests.engine.ranks import CASES, IDS, SHARES, train


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ranks")
    run_ranks(3, "tests.engine.ranks", [str(folder)], timeout=120, MEMFIT_COLLECTIVE_SECONDS="30")
    return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(3)]


@pytest.mark.parametrize("share", SHARES)
@pytest.mark.parametrize("case", [case for case in CASES if case != "own judge"])
def test_three_ranks_take_the_steps_of_one(ranks, case, share):
    alone = train(case, share, None, 0)
    for mine in ranks:
        for theirs, ours in zip(mine[case, share]["losses"], alone["losses"], strict=True):
            assert theirs == pytest.approx(ours, rel=1e-5)
        for name, value in alone["weights"].items():
            torch.testing.assert_close(mine[case, share]["weights"][name], value, rtol=1e-4, atol=1e-6)
    first, *others = (mine[case, share]["weights"] for mine in ranks)
    assert all(torch.equal(first[name], other[name]) for other in others for name in first)


def test_a_parameter_that_no_rank_uses_is_not_decayed(ranks):
    assert torch.equal(ranks[0]["late units", "ragged"]["weights"]["net.unused"], torch.ones(3))


def test_a_net_that_is_not_synchronised_is_another_on_each_rank(ranks):
    judges = [mine["own judge", "ragged"]["weights"]["judge.0.weight"] for mine in ranks]
    generators = [mine["own judge", "ragged"]["weights"]["generator.weight"] for mine in ranks]
    assert not torch.equal(judges[0], judges[1])
    assert torch.equal(generators[0], generators[1])


@pytest.mark.parametrize("at", [1, 2, 3])
@pytest.mark.parametrize("part", ["forward", "backward"])
def test_memory_that_runs_out_on_one_rank_is_a_failure_on_all_before_any_step(ranks, at, part):
    assert [mine["failures"][at, part] for mine in ranks] == [{"failed": (2,), "weights kept": True}] * 3


@pytest.mark.parametrize("at", [0, 1, 2])
@pytest.mark.parametrize("part", ["forward", "backward"])
def test_a_window_that_memory_fails_in_is_repeated_on_all_ranks(ranks, at, part):
    undisturbed, once, twice = ([mine["recovered"][at, part, times] for mine in ranks] for times in (0, 1, 2))
    assert [item["retries"] for item in (*undisturbed, *once, *twice)] == [0] * 3 + [1] * 3 + [2] * 3
    assert all(item["seconds"] < 10 for item in (*once, *twice))
    for mine, ids in zip(once, IDS, strict=True):
        assert mine["ids"] == ids
        assert all(torch.equal(mine["weights"][key], undisturbed[0]["weights"][key]) for key in mine["weights"])
    assert [mine["ids"] for mine in twice[:2]] == IDS[:2]
    assert len(twice[2]["ids"]) > len(IDS[2])
    assert sorted(i for ids in twice[2]["ids"] for i in ids) == list(range(6, 15))
    for mine in twice:
        assert mine["units"] == undisturbed[0]["units"]
        for key, value in undisturbed[0]["weights"].items():
            torch.testing.assert_close(mine["weights"][key], value, rtol=1e-6, atol=1e-6)
