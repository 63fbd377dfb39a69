"""Memory that really fails in validation or in saving, and what waits in files while such a phase runs.

python -m pytest tests/train/test_phase_faults.py
"""

import errno
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from torch import nn

from memfit.errors import Exit
from memfit.plan import PhasePolicy
from memfit.train.checkpoint.checkpoints import Checkpoints
from memfit.train.loop.loop import TrainingLoop
from memfit.train.loop.memory_reports import MemoryReports
from memfit.train.recovery.memory_growth import GrownMemoryError
from testing.faulty_jobs import Noisy, Plain, Spoiled, run, run_out_of_memory, same


class Saving(Plain):
    """What it saves beside takes memory."""

    def saved(self, nets, optimizers):
        Spoiled.points("saved")
        return {**super().saved(nets, optimizers), "beside": torch.ones(2)}


def test_a_save_is_tried_again_where_what_the_job_saves_runs_out_of_memory(tmp_path):
    said = []
    _, _, _, _, points = run(tmp_path / "undisturbed", Saving(), 3)
    last = points.reached["saved"] - 1
    code, *_, seen = run(tmp_path / "once", Saving(), 3, {("saved", last): 1}, saves=said.append)
    assert (code, seen.failed, said) == (Exit.DONE, 1, [])
    code, *_, seen = run(
        tmp_path / "twice", Saving(), 3, dict.fromkeys([("saved", last), ("saved", last + 1)], 1), saves=said.append
    )
    assert (code, seen.failed) == (Exit.STOPPED, 2)
    assert len(said) == 1
    assert "no memory for it" in said[0]


def test_a_validation_that_fails_is_tried_smaller_and_then_left_out(tmp_path):
    _, wanted, ids, _, _ = run(tmp_path / "whole", Noisy(), 3)
    said = []
    fails = {("validate", number): 1 for number in (0, 2, 3)}
    code, learnt, answer, metrics, _ = run(tmp_path / "run", Noisy(), 3, fails, say=said.append)
    assert code == Exit.DONE
    assert [line["validation_tries"] for line in metrics] == [2, 2, 1]
    assert [line["validation"] is None for line in metrics] == [False, True, False]
    assert "validation was left out" in said[-1]
    assert answer == ids
    assert same(learnt, wanted)


def test_an_optimizers_state_that_waits_in_a_file_comes_back_bit_for_bit(tmp_path):
    _, wanted, _, _, _ = run(tmp_path / "whole", Noisy(), 3)
    policy = PhasePolicy(optimizer="aside")
    code, learnt, _, metrics, _ = run(tmp_path / "run", Noisy(), 3, validation=policy)
    assert code == Exit.DONE
    assert all(line["validation"] for line in metrics)
    assert same(learnt, wanted)
    assert not list((tmp_path / "run").glob(".aside*"))


class Judged(Noisy):
    """A net that only validation uses, and one that only training uses."""

    net_phases: ClassVar = {"judge": ("validate",), "front": ("train",)}

    def nets(self):
        judge = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4)).requires_grad_(False)
        return {**super().nets(), "judge": judge}

    def loss(self, nets, batch):
        self.seen.setdefault("train", set()).add(waiting(nets))
        return super().loss(nets, batch)

    def validate(self, nets, batch):
        self.seen.setdefault("validate", set()).add(waiting(nets))
        return {"size": nets["judge"](batch[0]).square().mean()}


def waiting(nets):
    """Nets whose parameters lie in files."""
    files = [line.split() for line in Path("/proc/self/maps").read_text().splitlines() if "/.aside." in line]
    ranges = [tuple(int(end, 16) for end in file[0].split("-")) for file in files]
    return tuple(n for n, net in nets.items() if any(a <= next(net.parameters()).data_ptr() < b for a, b in ranges))


def test_a_net_that_a_phase_does_not_use_waits_in_a_file(tmp_path):
    class Job(Judged):
        seen: ClassVar = {}

    _, wanted, _, metrics, _ = run(tmp_path / "keep", Job(), 3)
    assert Job.seen == {"train": {()}, "validate": {()}}
    Job.seen.clear()
    code, learnt, _, answer, _ = run(tmp_path / "aside", Job(), 3, idle_nets="aside")
    assert code == Exit.DONE
    assert Job.seen == {"train": {("judge",)}, "validate": {("front",)}}
    assert [line["validation"] for line in answer] == [line["validation"] for line in metrics]
    assert same(learnt, wanted)
    assert not list((tmp_path / "aside").glob(".aside*"))


@pytest.mark.parametrize("failing", [(2,), (3,), (2, 3)])
def test_saving_that_fails_costs_no_step(failing, tmp_path, monkeypatch):
    _, wanted, ids, _, _ = run(tmp_path / "whole", Noisy(), 3)
    calls = []

    def write(*arguments, plain=Checkpoints.write, **options):
        calls.append(1)
        if len(calls) in failing:
            run_out_of_memory()
        return plain(*arguments, **options)

    monkeypatch.setattr(Checkpoints, "write", write)
    said = []
    code, learnt, answer, _, _ = run(tmp_path / "run", Noisy(), 3, every=0, saves=said.append)
    assert code == Exit.DONE
    assert [line.split(":")[0] for line in said] == ["checkpoint of window 2 not written"] * (len(failing) - 1)
    assert all("no memory for it" in line for line in said)
    assert answer == ids
    assert same(learnt, wanted)


def test_memory_that_has_grown_is_named_where_it_runs_out_in_a_save(tmp_path, monkeypatch):
    def save(self, next_window):
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    monkeypatch.setattr(TrainingLoop, "_save", save)
    monkeypatch.setattr(MemoryReports, "grown_memory", lambda self, failure: GrownMemoryError("no sample is to blame"))
    with pytest.raises(GrownMemoryError):
        run(tmp_path, Plain(), 3)
