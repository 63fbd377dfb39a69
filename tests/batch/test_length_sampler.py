"""pytest tests/batch/test_length_sampler.py"""

import warnings

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader, Dataset
from torchdata.stateful_dataloader import StatefulDataLoader

from memfit.batch import LengthBatchSampler, PaddedCost, batch_loader
from memfit.errors import InputError

LENGTHS = np.random.default_rng(0).integers(10, 300, 500)


class Ids(Dataset):
    def __init__(self, size=500):
        self.size = size

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        return index


def samplers(world, lengths=LENGTHS, budget=1500, **options):
    return [LengthBatchSampler(lengths, budget, rank=rank, world=world, **options) for rank in range(world)]


def drawn(ranks):
    return sorted(i for sampler in ranks for batch in sampler for i in batch)


def test_order_is_a_function_of_seed_and_epoch_alone() -> None:
    first, other = samplers(2, seed=5)[0], samplers(2, seed=5)[0]
    list(other)
    for epoch in (3, 1):
        first.set_epoch(epoch)
    other.set_epoch(1)
    assert list(first) == list(other) == list(first)
    assert list(samplers(2, seed=6)[0]) != list(samplers(2, seed=5)[0])
    first.set_epoch(2)
    assert list(first) != list(other)


@given(
    size=st.integers(1, 80),
    budget=st.integers(60, 400),
    stretches=st.lists(st.tuples(st.integers(1, 6), st.integers(0, 9)), min_size=1, max_size=4),
    seed=st.integers(0, 2),
    epoch=st.integers(0, 2),
    noise=st.sampled_from([0.0, 0.1]),
)
def test_any_chain_of_worlds_gives_every_id_exactly_once(size, budget, stretches, seed, epoch, noise):
    lengths = np.random.default_rng(size).integers(1, 61, size)
    state, seen = None, []
    for number, (world, steps) in enumerate(stretches):
        ranks = samplers(world, lengths, budget, seed=seed, noise=noise, remainder="empty")
        counts = set()
        for sampler in ranks:
            sampler.set_epoch(epoch)
            if state:
                sampler.load_state_dict(state)
            assert sampler.epoch == epoch
            counts.add(len(sampler))
        assert len(counts) == 1
        steps = counts.pop() if number == len(stretches) - 1 else min(steps, len(ranks[0]) - 1)
        for sampler in ranks:
            batches = iter(sampler)
            collected = [next(batches) for _ in range(steps)]
            seen += [i for batch in collected for i in batch]
            assert all(not batch or len(batch) * lengths[batch].max() <= budget for batch in collected)
        state = ranks[0].state_dict()
        assert all(sampler.state_dict() == state for sampler in ranks)
        if len(seen) == size:
            break
    assert sorted(seen) == list(range(size))


def test_resuming_continues_where_it_stopped() -> None:
    items = list(samplers(3)[1])
    first = samplers(3)[1]
    batches = iter(first)
    head = [next(batches) for _ in range(7)]
    assert first.state_dict() == first.state_at(7)
    second = samplers(3)[1]
    second.load_state_dict(first.state_dict())
    second.set_epoch(0)
    assert len(second) == len(items) - 7
    assert head + list(second) == items
    assert list(second) == items


def test_the_state_of_a_done_epoch_is_the_next_epochs_start() -> None:
    sampler = samplers(2)[0]
    sampler.set_epoch(4)
    list(sampler)
    assert sampler.state_dict() == {"state": 5}


def test_a_sample_over_the_budget_is_named_with_its_length_and_need() -> None:
    with pytest.raises(InputError, match=r"sample 2, the longest of 2 .*length 900 needs 900 .* a batch is 800"):
        LengthBatchSampler([10, 850, 900, 20], 800)
    with pytest.raises(InputError, match=r"length 50 needs 7550 "):
        LengthBatchSampler([50], 800, cost=PaddedCost(linear=1, quadratic=3))
    kept = LengthBatchSampler([10, 850, 900, 20], 800, too_long="drop")
    assert kept.dropped.tolist() == [1, 2]
    assert drawn([kept]) == [0, 3]


@pytest.mark.parametrize("options", [
    {"rank": 2, "world": 2}, {"max_items": 0}, {"noise": 1.0}, {"seed": -1}, {"too_long": "skip"},
    {"remainder": "wrap"},
])  # fmt: skip
def test_wrong_settings_are_one_teaching_line(options) -> None:
    with pytest.raises(InputError):
        LengthBatchSampler([1, 2], 10, **options)


def test_a_torch_loader_with_workers_gives_every_id_once() -> None:
    loaders = [DataLoader(Ids(), batch_sampler=sampler, num_workers=2) for sampler in samplers(2)]
    assert sorted(i for loader in loaders for batch in loader for i in batch.tolist()) == list(range(500))


@pytest.mark.parametrize("workers", [0, 2])
def test_a_stateful_loader_resumes_behind_what_was_trained_not_behind_what_was_prefetched(workers) -> None:
    def loader():
        return StatefulDataLoader(Ids(), batch_sampler=samplers(2)[0], num_workers=workers)

    collected = [batch.tolist() for batch in loader()]
    first = loader()
    batches = iter(first)
    head = [next(batches).tolist() for _ in range(5)]
    state = first.state_dict()
    second = loader()
    second.load_state_dict(state)
    assert head + [batch.tolist() for batch in second] == collected
    assert [batch.tolist() for batch in second] == collected


def test_accelerate_passes_the_epoch_on_and_gives_each_rank_its_own() -> None:
    from accelerate.data_loader import prepare_data_loader

    def prepared(rank):
        sampler = LengthBatchSampler(LENGTHS, 1500, world=3, every_rank=True)
        loader = DataLoader(Ids(), batch_sampler=sampler)
        return prepare_data_loader(loader, num_processes=3, process_index=rank)

    loaders = [prepared(rank) for rank in range(3)]
    epochs = [[[batch.tolist() for batch in loader] for loader in loaders] for _ in range(2)]
    own = samplers(3)
    for epoch, ranks in enumerate(epochs):
        for sampler, batches in zip(own, ranks, strict=True):
            sampler.set_epoch(epoch)
            assert batches == list(sampler)
    assert epochs[0] != epochs[1]


def test_lightning_does_not_wrap_it_again_and_passes_the_epoch_on() -> None:
    from lightning.fabric.utilities.data import _set_sampler_epoch
    from lightning.pytorch import Trainer
    from lightning.pytorch.trainer.states import RunningStage

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        options = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
        trainer = Trainer(accelerator="cpu", devices=2, strategy="ddp", enable_model_summary=False, **options)
    sampler = samplers(2)[0]
    loader = batch_loader(Ids(), sampler)
    assert trainer._data_connector._prepare_dataloader(loader, shuffle=True, mode=RunningStage.TRAINING) is loader
    _set_sampler_epoch(loader, 3)
    assert sampler.epoch == 3
    assert [batch.tolist() for batch in loader] == list(sampler)
    by_batch_sampler = DataLoader(Ids(), batch_sampler=samplers(2)[0])
    with pytest.raises(TypeError, match="use_distributed_sampler=False"):
        trainer._data_connector._prepare_dataloader(by_batch_sampler, shuffle=True, mode=RunningStage.TRAINING)
    _set_sampler_epoch(by_batch_sampler, 3)
    assert by_batch_sampler.batch_sampler.epoch == 3
