"""A validation that follows from another trace of the same step is the one that a trace gives."""

from types import SimpleNamespace
from typing import ClassVar

import pytest
import torch

from memfit.device.hardware.catalogue import find_device
from memfit.job import Shape
from memfit.loading import load_job
from memfit.planner.job_reading import facts_of
from memfit.planner.predict import trace_question
from memfit.planner.prediction import TracedQuestion
from memfit.trace.followed_validation import _held
from tests.trace.test_second_window import Attends, Norms, differing

CARD = find_device("rtx4090")
validated: list[int] = []
"""Items of the batches that were validated."""


class Fixed(Norms):
    """Validates three samples, whatever it trains on."""

    def validation_batch(self, shape):
        return torch.zeros(3, 8)

    def validate(self, nets, batch):
        validated.append(len(batch))
        return {"mean": nets["net"](batch).mean()}


class FixedAttention(Attends, Fixed):
    """For whose training and validation cards have other kernels."""

    def validate(self, nets, batch):
        validated.append(len(batch))
        return {"mean": self.loss(nets, batch)[0]}


class LoadsWhatIsLookedAt(dict):
    """As Transformers' mappings of models, which import each model that they hold."""

    def items(self):
        raise AssertionError

    __len__ = __iter__ = keys = values = items


loads = LoadsWhatIsLookedAt(model=1)


class Counts(Fixed):
    """Remembers how often it has trained: less often where the second window follows, too."""

    def loss(self, nets, batch):
        nets["net"].steps = getattr(nets["net"], "steps", 0) + 1
        return super().loss(nets, batch)


class ReadsShape(Fixed):
    """Makes a validation batch of at least three samples."""

    def validation_batch(self, shape):
        return torch.zeros(max(3, shape.items), 8)


of_file = {"last": 0}
PLACES = ("module", "dict", "object", "list", "class", "file")


class Like(Fixed):
    """Validates as many samples as it has trained on last: on a module, in a dict, in an object, in a list, on the
    class or in a variable of the file."""

    of_class: ClassVar[int] = 0

    where: str = "module"

    def nets(self):
        nets = super().nets()
        nets["net"].sizes = {"last": 0, "other": 1}
        nets["net"].about = SimpleNamespace(size=(0,))
        nets["net"].seen = []
        return nets

    def loss(self, nets, batch):
        net, items = nets["net"], len(batch)
        if self.where == "module":
            net.last = items
        elif self.where == "dict":
            net.sizes["last"] = items
        elif self.where == "object":
            net.about.size = batch.shape
        elif self.where == "class":
            type(self).of_class = items
        elif self.where == "file":
            of_file["last"] = items
        else:
            net.seen.append(items)
        return super().loss(nets, batch)

    def validate(self, nets, batch):
        net = nets["net"]
        last = {"module": getattr(net, "last", 0), "dict": net.sizes["last"], "object": net.about.size[0]}
        last |= {"class": self.of_class, "file": of_file["last"]}
        items = last[self.where] if self.where in last else net.seen[-1]
        return super().validate(nets, batch.repeat(items, 1))


class Keeps(Fixed):
    """Validates on the samples that it has trained on last."""

    def loss(self, nets, batch):
        nets["net"].kept = batch.detach()
        return super().loss(nets, batch)

    def validate(self, nets, batch):
        return super().validate(nets, torch.cat([batch, nets["net"].kept]))


class Leaves(Fixed):
    """Keeps a mean of each validation."""

    def validate(self, nets, batch):
        values = super().validate(nets, batch)
        nets["net"].mean = values["mean"].detach()
        return values


class Data(Fixed):
    """Validates on as many samples as are positive."""

    def validate(self, nets, batch):
        chosen = batch[batch[:, 0] > 0]
        return super().validate(nets, chosen)


def traced(job, items, device=CARD, like=None) -> TracedQuestion:
    return trace_question(job, Shape(items=items), device, checkpointing={}, like=like)


def differences(job, items, like, device=CARD) -> list[str]:
    """What differs in a trace with what follows, beside what it says of attributes; ``validated`` is what was validated
    for that."""
    whole = traced(job, items, device)
    validated.clear()
    (trace,), (own,) = traced(job, items, device, like).traces.values(), whole.traces.values()
    return [name for name in differing(trace, own) if name != "fixed_validation"]


@pytest.mark.parametrize("job", [Fixed(), FixedAttention()], ids=["fixed", "attends"])
@pytest.mark.parametrize("items", [2, 5])
def test_a_fixed_validation_follows(job, items):
    assert differences(job, items, traced(job, 1)) == []
    assert validated == []


@pytest.mark.parametrize(
    "job",
    [ReadsShape(), Counts(), *(Like(where=each) for each in PLACES), Keeps(), Leaves(), Data()],
    ids=["reads the shape", "counts", *PLACES, "keeps a batch", "leaves something", "data"],
)
def test_a_validation_that_may_depend_on_the_micro_batch_is_traced(job):
    assert differences(job, 5, traced(job, 2)) == []
    assert validated != []


def test_nothing_is_loaded_by_looking_at_it():
    assert _held(loads) == (("model", 1),)


def test_a_validation_of_other_kernels_is_traced():
    job = FixedAttention()
    assert differences(job, 2, traced(job, 2, find_device("t4"))) == []
    assert validated != []


def test_cards_are_told_apart_by_what_the_validation_asks():
    """The trace that follows holds for no card for which the other one would not."""
    job = FixedAttention()
    like = traced(job, 1)
    followed = traced(job, 2, like=like)
    assert set(like.facts) <= set(followed.facts)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["latentsync/stage1", "latentsync/stage2", "musetalk/stage1"])
@pytest.mark.parametrize("card", ["rtx3090", "t4", "h100"])
def test_validations_of_built_in_jobs_follow(name, card):
    job, device = load_job(name, {}), find_device(card)
    own = facts_of(job).own
    like = trace_question(job, Shape(items=1), device, checkpointing=own)
    for items in (2, 3):
        question = trace_question(job, Shape(items=items), device, checkpointing=own, like=like)
        fresh = trace_question(job, Shape(items=items), device, checkpointing=own)
        (trace,), (own_trace,) = question.traces.values(), fresh.traces.values()
        assert differing(trace, own_trace) in ([], ["fixed_validation"])
