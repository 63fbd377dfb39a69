"""What forwards carry from window to window is in checkpoints: a run that goes on is the same bit for bit.

python -m pytest tests/train/test_carried_checkpoints.py
"""

import collections
import random

import numpy as np
import pytest
import torch

from memfit.apply.attribute_snapshot import MOST_BYTES
from memfit.apply.carried_state import CarriedState, put_carried
from memfit.apply.train_state import build
from memfit.errors import Exit
from memfit.job import Loss
from testing.faulty_jobs import Plain, run, same
from tests.train.test_carried_state import Carried, Teaching


class Drawing(Plain):
    """Generators of its own, and what it drew in containers."""

    def nets(self):
        self.sources = random.Random(4), torch.Generator().manual_seed(3)
        self.python, self.torch = self.sources
        self.numpy, self.legacy = np.random.default_rng(5), np.random.RandomState(6)
        self.last, self.table, self.sums = collections.deque(maxlen=3), {"a": torch.zeros(2), 3: {"n": 1}}, np.zeros(4)
        self.names, self.pair = {"x"}, None
        return super().nets()

    def loss(self, nets, batch):
        noise = torch.randn(batch[0].shape, generator=self.torch)
        made = nets["net"](batch[0] + 0.1 * noise).squeeze(-1)
        self.last.append(self.python.random() + self.numpy.random() + self.legacy.rand())
        self.table["a"] += 0.1
        self.table[3]["n"] += 1
        self.sums += 0.1
        self.names.add(str(self.table[3]["n"] % 5))
        self.pair = self.table[3]["n"], torch.ones(1) * float(made.detach().mean())
        off = sum(self.last) + float(self.table["a"].sum()) + self.sums.sum() + len(self.names) + float(self.pair[1])
        error = (made - 0.01 * off - batch[1]).square()
        return Loss(error.sum(), len(error))


@pytest.mark.parametrize(("job", "changing"), [(Carried, ()), (Drawing, ()), (Teaching, ("teacher.0.bias",))])
def test_a_run_that_goes_on_is_the_same(job, changing, tmp_path):
    code, wanted, *_ = run(tmp_path / "whole", job(), 8)
    assert code == Exit.DONE
    lines = []
    run(tmp_path / "run", job(), 8, last=2, saves=lines.append)
    code, learnt, *_ = run(tmp_path / "run", job(), 8, resumes=True, saves=lines.append, changing=changing)
    assert code == Exit.DONE
    assert same(learnt, wanted)
    assert not lines


class Bank(Plain):
    """What it carries is too large, or holds a graph."""

    def nets(self):
        self.bank, self.fixed, self.graph = torch.zeros(MOST_BYTES // 4 + 1), torch.zeros(MOST_BYTES // 4 + 1), None
        return super().nets()

    def loss(self, nets, batch):
        made = nets["net"](batch[0]).squeeze(-1)
        self.bank[0] += 1
        self.graph = made.sum()
        return Loss((made - batch[1]).square().sum(), len(made))


def test_what_no_checkpoint_holds_is_said_once(tmp_path):
    lines = []
    assert run(tmp_path, Bank(), 3, every=0.0, saves=lines.append)[0] == Exit.DONE
    (line,) = lines
    assert line.startswith("checkpoints do not hold Bank.bank (more than 16 MiB with the others), Bank.graph (a tensor")
    assert line.endswith("a resumed run is not the same bit for bit; make it a buffer of a trained net")


def test_what_forwards_leave_alone_is_in_no_checkpoint():
    train_state = build(Carried(), "cpu")
    carried = CarriedState(train_state)
    train_state.job.centre.lerp_(torch.ones(1), 0.5)
    train_state.job.other = object()
    train_state.job.seen = train_state.nets["net"].cell.weight_hh.detach()[0]
    assert list(carried.changed()) == ["attributes"]
    assert carried.kept == ["Carried.centre"]
    assert carried.not_kept == ["Carried.seen (a view of a parameter or a buffer)"]


def test_the_state_of_another_job_is_refused():
    train_state = build(Carried(), "cpu")
    for carried, why in [
        ({"attributes": {"net.gone": {"hidden": {"value": 1}}}}, "it has attributes of net.gone"),
        ({"frozen": {"teacher.weight": torch.zeros(1)}}, "it has a frozen parameter teacher.weight"),
    ]:
        with pytest.raises(ValueError, match=why):
            put_carried(train_state, carried)


def test_an_object_of_the_same_kind_is_given_the_old_contents():
    job = Drawing()
    train_state = build(Drawing(), "cpu")
    carried = CarriedState(train_state)
    batch = train_state.job.collate([train_state.job.dataset()[0]])
    train_state.job.loss(train_state.nets, batch)
    other = build(job, "cpu")
    kept = job.torch, job.table, job.names
    put_carried(other, carried.changed())
    assert (job.torch, job.table, job.names) == kept
    assert all(now is before for now, before in zip((job.torch, job.table, job.names), kept, strict=True))
    assert job.last.maxlen == 3
    assert job.table[3] == {"n": 2}
