"""Memory that really fails at every point of a run costs no sample and no step.

python -m pytest tests/train/test_faults.py
"""

import json

import pytest
import torch

from memfit.apply import state_streaming
from memfit.apply.losses import MicroBatch
from memfit.apply.train_state import build
from memfit.engine.single import Single
from memfit.errors import Exit
from memfit.train.checkpoint.checkpoints import Checkpoints
from memfit.train.recovery.exactly_once import TornStepError
from memfit.train.recovery.giving_up import SampleTooLargeError
from memfit.train.recovery.recovery import Recovery
from memfit.train.recovery.reduced_limits import StartAgainError
from testing.faulty_jobs import ASKED, JOBS, Noisy, Plain, Spoiled, run, run_out_of_memory, same


def consumed(samples):
    return sorted(i for line in samples for i in line["ids"])


def test_a_failure_in_any_micro_step_changes_no_bit(tmp_path):
    check_every_point("gan", tmp_path, stride=8)
    check_every_point("gan, one micro-batch", tmp_path, stride=3)


@pytest.mark.slow
@pytest.mark.parametrize("name", JOBS)
def test_a_failure_at_every_micro_step_changes_no_bit(name, tmp_path):
    check_every_point(name, tmp_path)


def check_every_point(name, path, stride=1):
    kind, micro = JOBS[name]
    tmp_path = path / name
    _, wanted, ids, metrics, points = run(tmp_path / "whole", kind(), micro)
    assert [line["retries"] for line in metrics] == [0, 0, 0]
    assert points.reached["forward"] >= 3
    for point in ("forward", "backward"):
        for number in range(0, points.reached[point], stride):
            path = tmp_path / f"{point}{number}"
            code, learnt, answer, disturbed, seen = run(path, kind(), micro, {(point, number): 1})
            assert (code, seen.failed) == (Exit.DONE, 1)
            assert answer == ids
            assert sum(line["retries"] for line in disturbed) == 1
            assert same(learnt, wanted), f"{point} {number}"


def test_what_fails_again_is_split_and_learns_the_same_to_rounding(tmp_path):
    _, wanted, ids, _, _ = run(tmp_path / "whole", Plain(), 3)
    for number in (0, 2, 4):
        first = {("forward", number): 1, ("forward", number + number % 3 + 1): 1}
        code, learnt, answer, metrics, seen = run(tmp_path / f"{number}", Plain(), 3, first)
        assert (code, seen.failed) == (Exit.DONE, 2)
        assert consumed(answer) == consumed(ids)
        assert max(line["micro_batches"] for line in metrics) > 3
        for key, value in wanted.items():
            torch.testing.assert_close(learnt[key], value, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ["noisy", "gan"])
def test_a_failure_in_an_optimizer_step_applies_nothing_twice(name, tmp_path):
    kind, micro = JOBS[name]
    _, wanted, ids, _, points = run(tmp_path / "whole", kind(), micro, steps=True)
    every = points.reached["step"]
    for number in range(0, every, max(every // 5, 1)):
        code, learnt, answer, _, seen = run(tmp_path / f"{number}", kind(), micro, {("step", number): 1}, steps=True)
        assert (code, seen.failed) == (Exit.DONE, 1)
        assert answer == ids
        assert same(learnt, wanted), f"operator {number}"


def test_neither_does_one_while_state_visits_the_device(tmp_path, monkeypatch):
    monkeypatch.setattr(state_streaming, "PART", 64)
    _, wanted, ids, _, _ = run(tmp_path / "whole", Noisy(), 3)
    _, _, _, _, points = run(tmp_path / "host", Noisy(), 3, steps=True, optimizer_state="host")
    every = points.reached["step"]
    for number in range(0, every, max(every // 6, 1)):
        code, learnt, answer, _, seen = run(
            tmp_path / f"{number}", Noisy(), 3, {("step", number): 1}, steps=True, optimizer_state="host"
        )
        assert (code, seen.failed) == (Exit.DONE, 1)
        assert answer == ids
        assert same(learnt, wanted), f"operator {number}"


class TooLarge(Plain):
    """A sample whose forward never gets its memory."""

    def collate(self, samples):
        self.marked = any(abs(float(s[1]) - float(self.dataset()[7][1])) < 1e-9 for s in samples)
        return super().collate(samples)

    def loss(self, nets, batch):
        if self.marked:
            torch.empty(1 << 60, dtype=torch.uint8)
        return super().loss(nets, batch)


def test_a_sample_that_does_not_fit_alone_ends_the_run_with_its_id_shape_and_bytes(tmp_path):
    with pytest.raises(SampleTooLargeError, match=r"sample 7, tensors \(1, 6\), \(1,\), does not fit alone: .* held"):
        run(tmp_path / "run", TooLarge(), 3)


class TooLargeToFetch(Plain):
    """A sample whose batch never gets its memory."""

    def dataset(self):
        return [(*sample, 1 << 60 if number == 7 else 1) for number, sample in enumerate(super().dataset())]

    def collate(self, samples):
        wide = torch.empty(max(size for _, _, size in samples), dtype=torch.uint8)
        return [*super().collate([(x, y) for x, y, _ in samples]), wide]


def test_so_does_one_whose_batch_alone_is_too_large(tmp_path):
    said = r"sample 7, tensors \(1, 6\), \(1,\), \(1152921504606846976,\)"
    with pytest.raises(SampleTooLargeError, match=said):
        run(tmp_path / "run", TooLargeToFetch(), 3)


def test_it_is_left_out_and_counted_where_the_person_said_so(tmp_path):
    code, _, ids, metrics, _ = run(tmp_path / "run", TooLarge(), 3, skips=True)
    assert code == Exit.DONE
    assert [i for line in metrics for i in line["skipped_samples"]] == [7]
    assert consumed(ids) == [i for i in range(22) if i != 7]
    assert sum(line["global_batch_done"] for line in metrics) == 21


def test_a_flight_record_says_what_was_resident_and_what_was_asked_for(tmp_path):
    run(tmp_path / "run", Plain(), 3, {("forward", 4): 1})
    record = json.loads((tmp_path / "run" / "flight.json").read_text())
    assert (record["window"], record["part"], record["micro_batch"]) == (1, "forward", 1)
    assert record["requested_bytes"] == ASKED
    assert record["resident"]["measured"]["parameters"] == 4 * (6 * 16 + 16 + 16 + 1)
    assert record["resident"]["measured"]["gradients"] == record["resident"]["measured"]["parameters"]
    assert record["resident"]["by_module"][0]["module"] == "net.0"


class Averaged(Noisy):
    """Batch statistics, and units that are counted before the forward."""

    def collate(self, samples):
        Spoiled.points("collate")
        return super().collate(samples)

    def units(self, batch):
        return {"loss": len(batch[1])}


def test_a_run_that_gives_up_before_a_windows_first_turn_keeps_the_statistics_of_the_window_before(tmp_path):
    _, wanted, _, _, points = run(tmp_path / "undisturbed", Averaged(), 8, last=2)
    fails = {("collate", points.reached["collate"] + number): 1 for number in range(60)}
    with pytest.raises(SampleTooLargeError):
        run(tmp_path / "stops", Averaged(), 8, fails)
    newest = Checkpoints(tmp_path / "stops" / "checkpoints").newest(print)
    assert newest.next_window == 2
    assert torch.equal(newest.tensors.get("nets.front.1.running_mean"), wanted["front.1.running_mean"])


class Counted(Plain):
    """Counts its units before the forward, for which it collates."""

    def collate(self, samples):
        Spoiled.points("collate")
        return super().collate(samples)

    def units(self, batch):
        return {"loss": len(batch[1])}


def test_memory_that_runs_out_while_units_are_counted_is_recovered_as_in_a_forward(tmp_path):
    _, wanted, ids, _, _ = run(tmp_path / "undisturbed", Counted(), 3)
    for fails, retries, most in (
        ({("collate", 1): 1}, 1, 3),
        ({("collate", 1): 1, ("collate", 3): 1}, 2, 3),
        ({("collate", 4): 1, ("collate", 6): 1, ("collate", 8): 1}, 3, 4),
    ):
        code, learnt, samples, metrics, seen = run(tmp_path / f"{len(fails)}", Counted(), 3, fails)
        assert (code, seen.failed) == (Exit.DONE, len(fails))
        assert consumed(samples) == consumed(ids)
        assert sum(line["retries"] for line in metrics) == retries
        assert max(line["micro_batches"] for line in metrics) >= most
        assert most > 3 or same(learnt, wanted)
        assert all(torch.allclose(learnt[name], wanted[name], rtol=1e-5, atol=1e-6) for name in wanted)


def counted_on_ranks(least, **how):
    """(samples of the micro-batches of eight samples, tries), where batches of more than ``least`` do not fit."""
    train_state = build(Counted(), "cpu", Single(world=2, **how))  # rank 0; rank 1 has the same to say
    tries = []

    def make(ids, keeps=True):
        tries.append(len(ids))
        if len(ids) > least:
            run_out_of_memory()
        return MicroBatch(fetch=lambda: None, padded_units=len(ids), ids=ids, units=len(ids))

    recovery = Recovery(train_state, remake=make, cost=len, largest=8)
    return [micro.ids for micro in recovery.micro_batches([tuple(range(8))], make)], tries


def test_the_trial_makes_smaller_what_runs_out_of_memory_while_units_are_counted(tmp_path):
    _, wanted, *_ = run(tmp_path / "undisturbed", Counted(), 3)
    fails = {("collate", number): 1 for number in range(3)}
    code, learnt, _, metrics, seen = run(tmp_path / "fails", Counted(), 3, fails, proves=True)
    assert (code, seen.failed) == (Exit.DONE, 3)
    assert max(line["micro_batches"] for line in metrics) > 3
    assert all(torch.allclose(learnt[name], wanted[name], rtol=1e-5, atol=1e-6) for name in wanted)


def test_a_rank_of_several_makes_smaller_what_runs_out_of_memory_while_units_are_counted():
    made, tries = counted_on_ranks(3, syncs_in_backward=False)
    assert [i for ids in made for i in ids] == list(range(8))
    assert max(map(len, made)) <= 3
    assert tries[:3] == [8, 8, 8]
    with pytest.raises(SampleTooLargeError, match="rank 0: sample 0, "):
        counted_on_ranks(0, syncs_in_backward=False)


def test_ranks_that_wait_for_each_other_start_again_where_units_cannot_be_counted():
    with pytest.raises(StartAgainError, match="out of memory in fetch") as raised:
        counted_on_ranks(3, syncs_in_backward=True)
    assert raised.value.limits.most == 4


@pytest.mark.parametrize(("world", "raised"), [(1, TornStepError), (2, StartAgainError)])
def test_ranks_start_again_where_a_step_cannot_be_finished(world, raised):
    train_state = build(Counted(), "cpu", Single(world=world))
    recovery = Recovery(train_state, remake=lambda ids: None, cost=len, largest=8)
    optimizer = train_state.optimizers["sgd"]
    for parameter in train_state.nets["net"].parameters():
        parameter.grad = torch.zeros_like(parameter)
    with pytest.raises(raised, match="GiB asked for") as given:
        recovery.guard.once(run_out_of_memory, optimizer)
    assert world == 1 or given.value.limits.most == 4


def test_a_sample_whose_batch_never_fits_is_named_or_left_out(tmp_path):
    fails = {("collate", number): 1 for number in range(60)}
    with pytest.raises(SampleTooLargeError, match=r"sample \d+, .* memory ran out in fetch"):
        run(tmp_path / "stops", Counted(), 3, fails)
    assert Checkpoints(tmp_path / "stops" / "checkpoints").numbers() == [0]
    fails = {("collate", number): 1 for number in range(4)}
    code, _, _, metrics, _ = run(tmp_path / "skips", Counted(), 1, fails, skips=True)
    assert code == Exit.DONE
    assert sum(len(line["skipped_samples"]) for line in metrics) == 2


def test_a_window_without_valid_units_is_skipped_and_said(tmp_path):
    class Nothing(Plain):
        def collate(self, samples):
            self.empty = getattr(self, "calls", 0) // 3 == 1
            self.calls = getattr(self, "calls", 0) + 1
            return super().collate(samples)

        def loss(self, nets, batch):
            sums, units = super().loss(nets, batch)
            return sums * (not self.empty), 0 if self.empty else units

    code, _, ids, metrics, _ = run(tmp_path / "run", Nothing(), 3)
    assert code == Exit.DONE
    assert [line["skipped"] for line in metrics] == [[], ["loss"], []]
    assert [line["loss"] is None for line in metrics] == [False, True, False]
    assert metrics[1]["alarm"] == "no valid unit"
    assert len(ids) == 3


@pytest.mark.parametrize("name", ["noisy", "gan, one micro-batch"])
def test_a_run_that_proved_its_envelope_first_is_the_same_bit_for_bit(name, tmp_path):
    kind, micro = JOBS[name]
    _, wanted, ids, _, points = run(tmp_path / "without", kind(), micro, validate=False)
    code, learnt, answer, metrics, more = run(tmp_path / "with", kind(), micro, proves=True)
    assert code == Exit.DONE
    assert more.reached["forward"] > points.reached["forward"]
    assert more.reached["validate"] == 4
    assert [set(line["validation"]) for line in metrics] == [{"error"} if name == "noisy" else {"size"}] * 3
    assert answer == ids
    assert same(learnt, wanted)


def test_an_envelope_that_fails_makes_micro_batches_smaller_before_the_first_step(tmp_path):
    first = {("forward", 0): 1, ("forward", 1): 1}
    code, _, ids, metrics, _ = run(tmp_path / "run", Plain(), 4, first, proves=True)
    assert code == Exit.DONE
    assert [line["retries"] for line in metrics] == [0, 0, 0]
    assert [line["micro_batches"] for line in metrics] == [4, 4, 3]
    assert consumed(ids) == list(range(22))


@pytest.mark.parametrize("name", ["noisy", "gan"])
def test_a_step_of_the_trial_that_fails_is_tried_again(name, tmp_path):
    kind, micro = JOBS[name]
    _, wanted, ids, _, points = run(tmp_path / "without", kind(), micro, steps=True)
    _, _, _, _, both = run(tmp_path / "with", kind(), micro, steps=True, proves=True)
    of_the_trial = both.reached["step"] - points.reached["step"]
    assert of_the_trial > 0
    for number in range(0, of_the_trial, max(of_the_trial // 7, 1)):
        fails = {("step", number): 1}
        code, learnt, answer, _, seen = run(tmp_path / f"{number}", kind(), micro, fails, steps=True, proves=True)
        assert (code, seen.failed) == (Exit.DONE, 1)
        assert answer == ids
        assert same(learnt, wanted), f"operator {number}"


def test_a_step_of_the_trial_that_fails_three_times_ends_the_run(tmp_path):
    fails = {("step", number): 1 for number in range(3)}
    with pytest.raises(RuntimeError, match="allocate memory"):
        run(tmp_path / "run", Plain(), 3, fails, steps=True, proves=True)
