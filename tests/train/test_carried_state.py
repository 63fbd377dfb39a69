"""What forwards carry from batch to batch in attributes is put back after the trial and after a failure of memory.

python -m pytest tests/train/test_carried_state.py
"""

import copy

import pytest
import torch
from torch import nn

from memfit.apply.attribute_snapshot import MOST_BYTES, AttributeSnapshot
from memfit.errors import Exit
from memfit.job import Loss
from memfit.train.loop.loop import SpoiledByTrialError
from testing.faulty_jobs import Plain, Spoiled, run, same


class Carrying(nn.Module):
    """A recurrent cell whose hidden state goes on from batch to batch, and a count."""

    def __init__(self, carries_always):
        super().__init__()
        self.carries_always = carries_always
        self.cell, self.spoiled, self.head = nn.GRUCell(6, 8), Spoiled(), nn.Linear(8, 1)
        self.hidden, self.seen = None, 0

    def forward(self, x):
        hidden = torch.zeros(1, 8) if self.hidden is None else self.hidden
        out = self.cell(x, hidden.expand(len(x), -1).contiguous())
        if self.training or self.carries_always:
            self.hidden, self.seen = out.mean(0, keepdim=True).detach(), self.seen + 1
        return self.head(self.spoiled(out)) / (1 + self.seen)


class Carried(Plain):
    """The job keeps a centre, a list of the last ones, and a generator of its own."""

    validates_too: bool = False

    def nets(self):
        torch.manual_seed(0)
        self.generator = torch.Generator().manual_seed(7)
        self.centre, self.last = torch.zeros(1), []
        return {"net": Carrying(self.validates_too)}

    def loss(self, nets, batch):
        noise = torch.randn(batch[0].shape, generator=self.generator)
        made = nets["net"](batch[0] + 0.1 * noise).squeeze(-1)
        error = (made - self.centre - sum(self.last) - batch[1]).square()
        self.centre.lerp_(made.detach().mean(), 0.1)
        self.last = [*self.last[-2:], float(self.centre)]
        return Loss(error.sum(), len(error))


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    return run(tmp_path_factory.mktemp("undisturbed"), Carried(), 3)


@pytest.mark.parametrize("point", [("forward", 0), ("forward", 4), ("backward", 7)], ids=str)
def test_a_window_done_again_begins_with_what_the_one_before_it_left(point, undisturbed, tmp_path):
    code, learnt, *_, points = run(tmp_path, Carried(), 3, {point: 1})
    assert (code, points.failed) == (Exit.DONE, 1)
    assert same(learnt, undisturbed[1])


class Validated(Carried):
    """Its forwards carry in validation too, where memory runs out behind them."""

    def validate(self, nets, batch):
        size = nets["net"](batch[0]).square().mean()
        Spoiled.points("validate")
        return {"size": size}


@pytest.mark.parametrize("number", [0, 1])
def test_a_validation_done_again_begins_with_what_training_left(number, tmp_path):
    _, wanted, *_ = run(tmp_path / "undisturbed", Validated(validates_too=True), 3)
    code, learnt, *_, points = run(tmp_path / "fails", Validated(validates_too=True), 3, {("validate", number): 1})
    assert (code, points.failed) == (Exit.DONE, 1)
    assert same(learnt, wanted)


def test_the_trial_leaves_nothing_in_attributes(undisturbed, tmp_path):
    _, learnt, *_ = run(tmp_path, Carried(), 3, proves=True)
    assert same(learnt, undisturbed[1])


class Teaching(Plain):
    """The loss moves an average of the weights in a frozen net."""

    def nets(self):
        net = super().nets()["net"]
        return {"net": net, "teacher": copy.deepcopy(net).requires_grad_(False)}

    def loss(self, nets, batch):
        with torch.no_grad():
            for old, new in zip(nets["teacher"].parameters(), nets["net"].parameters(), strict=True):
                old.lerp_(new, 0.1)
            aim = nets["teacher"](batch[0]).squeeze(-1)
        error = (nets["net"](batch[0]).squeeze(-1) - batch[1] - 0.1 * aim).square()
        return Loss(error.sum(), len(error))


@pytest.mark.parametrize("fails", [{}, {("forward", 0): 1}], ids=["whole", "without memory"])
def test_the_first_window_is_repeated_with_what_the_trial_has_seen_to_change(fails, tmp_path):
    with pytest.raises(SpoiledByTrialError) as spoiled:
        run(tmp_path / "trial", Teaching(), 3, fails, proves=True)
    names = spoiled.value.names
    assert names == ("teacher.0.bias", "teacher.0.weight", "teacher.3.bias", "teacher.3.weight")
    _, wanted, *_ = run(tmp_path / "undisturbed", Teaching(), 3)
    code, learnt, *_, points = run(tmp_path / "again", Teaching(), 3, {("forward", 0): 1}, changing=names)
    assert (code, points.failed) == (Exit.DONE, 1)
    assert same(learnt, wanted)


class Holder:
    """Stands for a job."""


def test_containers_are_put_back_in_place_and_what_is_too_large_is_left():
    job = Holder()
    job.numbers, job.table, job.kinds = [1, 2], {"a": torch.ones(2), "b": {"c": 1}}, {1}
    job.large = torch.zeros(MOST_BYTES + 1, dtype=torch.uint8)
    job.graph = torch.ones(1, requires_grad=True) * 2
    numbers, table, large, graph = job.numbers, job.table, job.large, job.graph
    snapshot = AttributeSnapshot([], job)
    snapshot.keep()
    for _ in range(2):
        job.numbers.append(3)
        job.table["a"].add_(1)
        job.table["b"]["d"] = 2
        job.table["a"] = torch.zeros(2)
        job.kinds.clear()
        job.new, job.large, job.graph = 1, None, graph * 2
        snapshot.restore()
        assert job.numbers is numbers
        assert numbers == [1, 2]
        assert table["a"].tolist() == [1, 1]
        assert table["b"] == {"c": 1}
        assert job.kinds == {1}
        assert not hasattr(job, "new")
        assert job.large is None
        assert float(job.graph.detach()) == 4
    del large
