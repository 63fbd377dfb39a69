"""What a window learns, against a plain loop; what recovery does at its edges. Each test kills a small change of code.

python -m pytest tests/train/test_window_exactness.py
"""

import os
from types import SimpleNamespace

import pytest
import torch

from memfit.apply.losses import MicroBatch
from memfit.apply.train_state import build
from memfit.apply.window import TurnGradients, run_window
from memfit.engine.collectives import RanksOutOfMemoryError
from memfit.job import Loss, Shape
from memfit.train.checkpoint.checkpoints import Checkpoints
from memfit.train.checkpoint.saver import Saver
from memfit.train.recovery import giving_up
from memfit.train.recovery import recovery as recovery_module
from memfit.train.recovery.failure import Failure
from memfit.train.recovery.giving_up import NothingLeftError
from memfit.train.recovery.memory_growth import GrownMemoryError
from memfit.train.recovery.part_sizes import GROW_AFTER
from memfit.train.recovery.recovery import IN_A_ROW, Recovery
from testing.faulty_jobs import Gan, Plain, run, run_out_of_memory, same


def gradients(job, sizes):
    """The gradients of one window in micro-batches of these sizes, where units come with the loss."""
    train_state = build(job, "cpu")
    data = torch.randn(sum(sizes), 7, generator=torch.Generator().manual_seed(0))
    parts = [
        MicroBatch(fetch=lambda rows=rows: [rows[:, :6], rows[:, 6]], padded_units=len(rows))
        for rows in data.split(list(sizes))
    ]
    kept = []
    train_state.optimizers["sgd"].register_step_pre_hook(
        lambda *_: kept.extend(p.grad.clone() for p in train_state.nets["net"].parameters())
    )
    run_window(train_state, parts)
    return kept


class Masked(Plain):
    """Every other sample is valid: padded units are twice the valid ones."""

    def loss(self, nets, batch):
        error = (nets["net"](batch[0]).squeeze(-1) - batch[1]).square()
        return Loss(error[::2].sum(), len(error[::2]))


class FreedLate(Plain):
    zero_grad = "after_forward"


@pytest.mark.parametrize("kind", [Plain, Masked, FreedLate])
@pytest.mark.parametrize("sizes", [(6, 6), (4, 4, 4), (2,) * 6])
def test_a_window_in_parts_has_the_gradients_of_the_whole(kind, sizes):
    for part, complete in zip(gradients(kind(), sizes), gradients(kind(), (12,)), strict=True):
        torch.testing.assert_close(part, complete, rtol=1e-5, atol=1e-6)


def test_gradients_that_a_window_leaves_behind_are_no_part_of_the_next(tmp_path):
    _, early, _, _, _ = run(tmp_path / "early", Plain(), 3)
    _, late, _, _, _ = run(tmp_path / "late", FreedLate(), 3)
    assert same(early, late)


def test_every_retry_of_a_job_of_several_turns_begins_with_the_same_random_numbers():
    drawn = []

    def attempt(parts):
        drawn.append(float(torch.rand(())))
        recovery.mark("fetch")
        if len(drawn) < 4:
            run_out_of_memory()
        return made_of(parts)

    micro = lambda ids: MicroBatch(fetch=lambda: None, padded_units=len(ids), ids=ids)  # noqa: E731
    recovery = Recovery(build(Gan(), "cpu"), remake=micro, cost=len, largest=32)
    recovery.begin()
    recovery.guard.gradients(attempt, [micro(tuple(range(32)))])
    assert len(drawn) == 4
    assert len(set(drawn)) == 1


def failing_at(calls):
    """A recovery of one micro-batch of eight samples that fails in these attempts; the parts of each attempt."""
    train_state = build(Plain(), "cpu")
    micro = lambda ids: MicroBatch(fetch=lambda: None, padded_units=len(ids), ids=ids)  # noqa: E731
    recovery = Recovery(train_state, remake=micro, cost=len, largest=8)
    seen = []

    def attempt(parts):
        seen.append([len(part.ids) for part in parts])
        recovery.mark("fetch")
        if len(seen) in calls:
            run_out_of_memory()
        return made_of(parts)

    def window():
        recovery.begin()
        parts = [micro(ids) for ids in recovery.parts([tuple(range(8))])]
        recovery.guard.gradients(attempt, parts)
        recovery.end()

    return recovery, window, seen


def made_of(parts):
    return TurnGradients(sums={}, units={}, norm=None, micro_batches=parts, empty=False)


def test_micro_batches_grow_back_after_quiet_windows_and_wait_longer_when_that_fails():
    recovery, window, seen = failing_at({1, 2})
    window()
    assert seen == [[8], [8], [4, 4]]
    for _ in range(GROW_AFTER - 1):
        window()
        assert recovery.sizes.cap == 4
    window()
    assert recovery.sizes.cap is None
    window()
    assert seen[-1] == [8]


def test_a_growth_that_fails_is_taken_back_at_once_and_tried_again_later():
    recovery, window, seen = failing_at({1, 2, 3 + GROW_AFTER + 1})
    for _ in range(1 + GROW_AFTER):
        window()
    assert recovery.sizes.cap is None
    window()
    assert seen[-2:] == [[8], [4, 4]]
    for _ in range(2 * GROW_AFTER - 1):
        window()
        assert recovery.sizes.cap == 4
    window()
    assert recovery.sizes.cap is None


def test_a_failure_on_another_rank_is_told_as_that_rank_saw_it(monkeypatch):
    train_state = build(Plain(), "cpu")
    recovery = Recovery(train_state, remake=lambda ids: None, cost=len, largest=8)
    recovery.mark("backward")

    def of_two_ranks(engine, own):
        return [own, type(own)(**{**vars(own), "part": "fetch", "rank": 1, "ids": (5,)})]

    monkeypatch.setattr(recovery_module, "gather", of_two_ranks)
    failure = recovery._failure(RanksOutOfMemoryError({1: "MemoryError"}), [])
    assert (failure.part, failure.rank, failure.ids) == ("fetch", 1, (5,))


@pytest.mark.parametrize("here", [True, False])
def test_ranks_give_up_together(here, monkeypatch):
    recovery = Recovery(build(Plain(), "cpu"), remake=lambda ids: None, cost=len, largest=8)
    recovery._state = SimpleNamespace(engine=SimpleNamespace(world=2, rank=1))

    def gives_up(parts, failure):
        raise GrownMemoryError("memory grew")

    def of_two_ranks(engine, own):
        assert (own is not None) == here
        return [None, (1, "rank 1: memory grew")]

    monkeypatch.setattr(recovery, "_smaller", gives_up)
    monkeypatch.setattr(giving_up, "gather", of_two_ranks)
    with pytest.raises(GrownMemoryError, match="rank 1: memory grew"):
        recovery._smaller_on([], None, here=here)


@pytest.mark.parametrize("larger", [True, False])
def test_only_samples_larger_than_what_has_fitted_are_left_out_without_end(larger):
    train_state = build(Plain(), "cpu")
    batch = train_state.job.batch(Shape(items=4))
    recovery = Recovery(
        train_state, remake=lambda ids: None, cost=lambda ids: 9 if larger else 4, largest=8, skips=True
    )
    fitting = MicroBatch(fetch=lambda: batch, padded_units=4, ids=(1, 2, 3, 4))
    run_window(train_state, [fitting], guard=recovery.guard)

    def left_out(number):
        failure = Failure(part="forward", micro_batch=0, ids=(), requested_bytes=8, held_bytes=8, message="")
        return recovery._without([], failure, (number,))

    for number in range(IN_A_ROW):
        assert left_out(number) == []
    run_window(train_state, [fitting], guard=recovery.guard)  # what fits in between ends the row
    for number in range(IN_A_ROW):
        assert left_out(number) == []
    if larger:
        assert left_out(99) == []
    else:
        with pytest.raises(
            NothingLeftError, match=r"with samples 0, 1, .*, 99, one after another .*no sample is to blame"
        ):
            left_out(99)


def test_a_window_begins_with_its_fetch():
    recovery = Recovery(build(Plain(), "cpu"), remake=lambda ids: None, cost=len, largest=8)
    recovery.mark("ema")
    recovery.begin()
    assert recovery.part == "fetch"


def test_a_checkpoint_is_on_disk_before_it_has_its_name(tmp_path, monkeypatch):
    """Tensors, plan, manifest, the lines and the folder are synced, then renamed, then the folder around is synced."""
    order, names = [], {}

    def synced(handle, plain=os.fsync):
        order.append(("sync", os.readlink(f"/proc/self/fd/{handle}")))
        plain(handle)

    def renamed(source, target, *arguments, plain=os.rename, **options):
        order.append(("rename", str(source)))
        names[str(source)] = str(target)
        plain(source, target, *arguments, **options)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(os, "rename", renamed)
    (tmp_path / "samples.jsonl").write_text("{}\n")
    from tests.train.test_reduced_limits import PLAN

    saver = Saver(checkpoints=Checkpoints(tmp_path / "checkpoints"), plan=PLAN, lines=[tmp_path / "samples.jsonl"])
    saver.save(build(Plain(), "cpu"), 1)
    folder = next(source for source, target in names.items() if target.endswith("/00000001"))
    at = order.index(("rename", folder))
    before = [path for kind, path in order[:at] if kind == "sync"]
    for part in ("state.safetensors", "plan.toml", "manifest.json"):
        assert any(part in path and path.startswith(folder) for path in before), part
    assert str(tmp_path / "samples.jsonl") in before
    assert before[-1] == folder
    assert ("sync", str(tmp_path / "checkpoints")) in order[at:]
