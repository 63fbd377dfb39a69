"""pytest tests/audit/test_report.py: exact counts, and the JSON that DESIGN.md promises."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from memfit.audit import Meant, audit
from memfit.audit.observe import Observer
from memfit.batch import LengthBatchSampler
from memfit.errors import InputError
from tests.audit.faults import shard_faults, step_faults, system_faults
from tests.audit.faults.data import FRAMES
from tests.audit.right import memfit_samplers, torch_loaders

HERE = Path(__file__).parent
KEYS = {
    "world", "batches_per_rank", "distinct", "duplicates", "missing", "dropped", "order_changes_each_epoch",
    "optimizer_steps", "padding_fraction", "imbalance",
}  # fmt: skip


def test_the_numbers_of_gpt_sovits_s1() -> None:
    """UPSTREAM.md: 450 / 113 / 50 batches and 3600 / 1800 / 1200 distinct clips on 1 / 2 / 3 cards."""
    worlds = audit(system_faults.sovits_s1, (1, 2, 3)).to_json()["worlds"]
    assert [world["batches_per_rank"] for world in worlds] == [[450], [113] * 2, [50] * 3]
    assert [world["distinct"] for world in worlds] == [3600, 1800, 1200]
    cured = audit(system_faults.sovits_s1_cured, (1, 2, 3)).to_json()["worlds"]
    assert [world["batches_per_rank"] for world in cured] == [[450], [225] * 2, [150] * 3]
    assert [world["distinct"] for world in cured] == [3600] * 3


def test_the_json_holds_what_is_promised() -> None:
    answer = json.loads(json.dumps(audit(shard_faults.unsharded, (1, 2)).to_json()))
    assert answer["dataset_size"] == 600
    assert answer["ok"] is False
    assert all(set(world) >= KEYS for world in answer["worlds"])
    assert answer["worlds"][1]["duplicates"] == 600
    assert answer["worlds"][0]["optimizer_steps"] is None
    assert answer["worlds"][0]["padding_fraction"] is None
    (finding,) = answer["findings"]
    assert (finding["code"], finding["world"]) == ("no-sharding", 2)


def test_dropped_samples_are_counted_with_the_reason() -> None:
    (world,) = audit(torch_loaders.torch_drop_last, [8]).to_json()["worlds"]
    assert (world["missing"], world["dropped"]) == (11, 11)
    assert world["dropped_why"] == "drop_last leaves out what does not fill the last step"
    audited = audit(system_faults.f5_too_long, [1])
    long = np.flatnonzero(FRAMES > 2700)
    assert audited.to_json()["worlds"][0]["missing_ids"] == long[:20].tolist()
    assert f"{len(long)} of 600 samples" in audited.findings[0].text
    kept = FRAMES[FRAMES <= 2700].max()
    assert f"greater length than {kept}, the longest that is given" in audited.findings[0].text


def test_what_is_mis_shared_is_missing_and_not_dropped() -> None:
    worlds = audit(system_faults.sovits_s1, (1, 2)).to_json()["worlds"]
    assert [(world["missing"], world["dropped"]) for world in worlds] == [(0, 0), (1800, 0)]
    worlds = audit(system_faults.sovits_s2_drops, (1, 2)).to_json()["worlds"]
    gone = int(((FRAMES <= 32) | (FRAMES > 1900)).sum())
    assert [(world["missing"], world["dropped"]) for world in worlds] == [(gone, gone)] * 2
    assert "by their lengths: those that are left out are" in worlds[0]["dropped_why"]


def test_padding_and_imbalance_are_those_of_the_batches() -> None:
    lengths = [10, 20, 30, 40]

    def target(rank, world):
        return [[[0, 1], [2]], [[3], []]][rank] if world == 2 else [[0, 1], [2, 3]]

    class Held(list):
        pass

    def held(rank, world):
        batches = Held(target(rank, world))
        batches.lengths = lengths
        return batches

    first, two = audit(held, [1, 2]).to_json()["worlds"]
    assert first["padding_fraction"] == pytest.approx(1 - 100 / 120)
    assert first["imbalance"] == 0
    assert two["padding_fraction"] == pytest.approx(1 - 100 / 110)
    assert two["imbalance"] == pytest.approx((40 + 30) / (40 + 15) - 1)


def test_steps_and_windows_of_a_loop() -> None:
    (world,) = audit(step_faults.s1_steps, [1]).to_json()["worlds"]
    assert world["optimizer_steps_per_rank"] == [[7, 7]]
    assert world["micro_batches_per_step"] == 4
    (world,) = audit(step_faults.s1_steps_cured, [1]).to_json()["worlds"]
    assert world["optimizer_steps"] == 8
    assert world["short_windows"] == 1
    assert audit(step_faults.musetalk_steps, [1]).to_json()["worlds"][0]["step_counts_micro_batches"] is True


def test_the_first_window_of_five_and_the_leak_are_said() -> None:
    text = audit(step_faults.s1_steps, [1]).findings[0].text
    assert "Of 14 steps 12 take 4 micro-batches, 1 takes 5, 1 takes 6" in text
    assert "the last 1 micro-batches of epoch 0 leak" in text


def test_a_sampler_that_works_alike_in_any_world_is_counted_alike() -> None:
    def target(rank, world):
        return LengthBatchSampler(FRAMES, 9600, rank=rank, world=world)

    audited = audit(target, (1, 2, 5), meant=Meant(global_batch=9600, unit="frames"))
    assert {world["distinct"] for world in audited.to_json()["worlds"]} == {600}
    assert [finding.code for finding in audited.findings] == ["global-given-as-per-gpu"] * 2


@pytest.mark.parametrize(("target", "said"), [
    ("faults.py", "not a file and a function"),
    (f"{HERE}/none.py:f", "no file"),
    (f"{HERE}/faults/data.py:none", "has no function 'none'"),
    (f"{HERE}/faults/data.py:SIZE", "has no function 'SIZE'"),
    (f"{HERE}/broken.py:f", "running its file raises ZeroDivisionError"),
    (f"{HERE}/targets.py:takes_one", "cannot be called with a rank and a world size"),
    (f"{HERE}/targets.py:gives_none", "no loader and no sampler"),
    (f"{HERE}/targets.py:fails", r"raises KeyError: 'here' \(line 16"),
])  # fmt: skip
def test_a_target_that_is_none_is_one_teaching_line(target, said, tmp_path) -> None:
    if "broken" in target:
        (tmp_path / "broken.py").write_text("1 / 0")
        target = f"{tmp_path}/broken.py:f"
    with pytest.raises(InputError, match=said):
        audit(target, [1])


def test_worlds_below_one_are_refused() -> None:
    with pytest.raises(InputError, match="a world has one rank or more"):
        audit(memfit_samplers.own, [0])


def test_nothing_of_the_audit_stays_behind() -> None:
    import os
    import random

    import torch
    import torch.distributed as dist
    from torch.utils.data import DataLoader

    before = random.getstate(), torch.random.get_rng_state(), dict(os.environ), DataLoader._get_iterator
    audit(torch_loaders.torch_asks_for_its_rank, [2])
    assert not dist.is_initialized()
    assert random.getstate() == before[0]
    assert torch.equal(torch.random.get_rng_state(), before[1])
    assert dict(os.environ) == before[2]
    assert DataLoader._get_iterator is before[3]


def test_workers_that_each_give_every_sample_are_named() -> None:
    text = audit(shard_faults.workers_repeat, [2]).findings[0].text
    assert "each of the loader's 2 workers gives every sample" in text


def test_a_batch_that_the_data_set_does_not_fill_is_named() -> None:
    def target(rank: int, world: int) -> DataLoader:
        data = TensorDataset(torch.arange(11))
        return DataLoader(data, batch_size=16, sampler=DistributedSampler(data, world, rank), drop_last=True)

    one_rank, two_ranks = audit(target, [1, 2]).findings
    assert "11 samples of a rank do not fill a batch of 16, and drop_last drops them" in one_rank.text
    assert "6 samples of a rank do not fill a batch of 16" in two_ranks.text


def test_missing_samples_that_are_no_rest_are_not_called_one() -> None:
    def target(rank: int, world: int, observe: Observer) -> None:
        for _ in range(2):
            for ids in DataLoader(TensorDataset(torch.arange(400)), batch_size=4, shuffle=True):
                observe.batch([int(i) for i in ids[0] if i % 200 != 7])

    assert "what does not fill the last step" not in audit(target, [1]).findings[0].text
