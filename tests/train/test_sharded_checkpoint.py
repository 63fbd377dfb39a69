"""A state that sharded ranks wrote goes on with other ranks, other engines and one device, and back.

python -m pytest tests/train/test_sharded_checkpoint.py
"""

import pytest
import torch

from memfit.apply.train_state import build
from memfit.engine.single import Single
from memfit.errors import InputError
from memfit.train.checkpoint.sharded_checkpoint import load_sharded
from testing.rank_copies import run_ranks
from tests.engine.ranks import CPU, Sentences
from tests.engine.zero_ranks import loaded, saved


def ranks(engine, world, what, state, folder):
    run_ranks(world, "tests.train.rank_spread", [engine, what, str(state), str(folder)])
    return torch.load(folder / f"{engine}-{what}-0.pt")


@pytest.fixture(scope="module")
def three(tmp_path_factory):
    folder = tmp_path_factory.mktemp("three")
    return folder / "state", ranks("fsdp2", 3, "save", folder / "state", folder)


def same(result, expected):
    assert result.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(result[name], value, rtol=1e-4, atol=1e-6)


def test_three_sharded_ranks_to_one_device(three):
    state, expected = three
    same(loaded(Single(), state), expected)


@pytest.mark.slow
def test_three_sharded_ranks_to_two(three, tmp_path):
    state, expected = three
    same(ranks("fsdp2", 2, "load", state, tmp_path), expected)


def test_three_sharded_ranks_to_two_replicas(three, tmp_path):
    state, expected = three
    same(ranks("ddp", 2, "load", state, tmp_path), expected)


def test_one_device_to_three_sharded_ranks(tmp_path):
    expected = saved(Single(), tmp_path / "state")
    same(ranks("fsdp2", 3, "load", tmp_path / "state", tmp_path), expected)


def test_another_jobs_state_is_refused(three):
    with pytest.raises(InputError, match="cannot be read into this job"):
        load_sharded(build(Sentences(), CPU), three[0])
