"""Cards on which the scratch within calls alone differs share a trace, and each has its own scratch.

python -m pytest tests/trace/test_card_calls.py
"""

import dataclasses

import numpy as np
import pytest
import torch
from torch import nn

from memfit.device.hardware.catalogue import find_device
from memfit.job import Shape
from memfit.planner.asked_job import AskedJob
from memfit.planner.derived_steps import card_groups
from memfit.planner.kept_questions import Shelf
from memfit.planner.predict import predict, trace_question
from memfit.planner.prediction import answer, holds_for
from memfit.trace.card_call_lines import are_calls_of, calls_between
from memfit.trace.card_calls import trace_on, with_card_scratch, without_card_scratch
from testing.nets import JOBS
from tests.trace.test_second_window import CARD, Norms, differing

AMPERE = tuple(map(find_device, ("rtx3060", "rtx3090", "a100-40gb", "rtx4090", "rtx5090")))
VOLTA, TURING = find_device("v100-16gb"), find_device("t4")
SHAPE = Shape(items=3)


class Reads(Norms):
    """Attention of few queries to many keys, which flash splits over idle multiprocessors, in two windows and in a
    validation that reads fewer."""

    precision: str = "bf16"
    keys: int = 2048

    def nets(self):
        return {"net": nn.Sequential(nn.Linear(8, 128), nn.Linear(128, 128))}

    def batch(self, shape):
        return torch.randn(shape.items, 64, 8)

    def _attended(self, nets, batch, keys):
        x = nets["net"](batch).reshape(len(batch), 64, 16, 8).transpose(1, 2)
        read = x[:, :, :1].expand(-1, -1, keys, -1)
        return torch.nn.functional.scaled_dot_product_attention(x, read, read)

    def loss(self, nets, batch):
        with self.autocast(batch.device):
            return self._attended(nets, batch, self.keys).float().sum(), len(batch)

    def validation_batch(self, shape):
        return torch.randn(2, 64, 8)

    def validate(self, nets, batch):
        with self.autocast(batch.device):
            return {"read": self._attended(nets, batch, 1024).float().sum()}


class Convolves(Norms):
    """Convolutions in half precision whose plans cuDNN searches, with gradients of all, of the weights, and of the
    bias alone."""

    precision: str = "fp16"

    def nets(self):
        layers = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 3, padding=1), nn.Conv2d(8, 4, 1), nn.Conv2d(4, 4, 3)
        layers[3].weight.requires_grad_(False)
        return {"net": nn.Sequential(*layers)}

    def batch(self, shape):
        return torch.randn(shape.items, 3, 16, 16)

    def loss(self, nets, batch):
        with self.autocast(batch.device):
            return nets["net"](batch).float().square().sum(), len(batch)


@pytest.fixture
def searched():
    """cuDNN searches its plans."""
    torch.backends.cudnn.benchmark = True
    yield
    torch.backends.cudnn.benchmark = False


def check_shared(job, traced_on, device, shape=SHAPE):
    """A question that was traced on one card is answered on another as its own trace is; gives both."""
    question, own = trace_question(job, shape, traced_on), trace_question(job, shape, device)
    assert holds_for(question, device)
    (trace,), (its,) = question.traces.values(), own.traces.values()
    assert differing(trace_on(trace, device), its) == []
    assert differing(trace_on(its, traced_on), trace) == []
    assert trace_on(trace, traced_on) is trace
    assert answer(question, "job", device).footprint == predict(job, "job", shape, device).footprint
    return trace, its


@pytest.mark.parametrize("device", AMPERE[1:], ids=lambda device: device.key)
def test_flash_splits_keys_as_each_card_does(device):
    trace, its = check_shared(Reads(), AMPERE[0], device)
    assert len(trace.nbytes) < len(its.nbytes)  # the smallest card has no idle multiprocessors


@pytest.mark.parametrize("micro_batches", [1, 2])
def test_recomputed_attention_is_split_too(micro_batches):
    more = {"checkpointing": {"net.0": "full"}, "micro_batches": micro_batches}
    (trace,), (its,) = (trace_question(Reads(), SHAPE, card, **more).traces.values() for card in AMPERE[:2])
    assert differing(trace_on(trace, AMPERE[1]), its) == []


@pytest.mark.parametrize(
    "job", [Reads(precision="fp16"), JOBS["unet"](precision="fp16"), Convolves()], ids=lambda job: type(job).__name__
)
def test_volta_and_turing_share_a_trace(job):
    check_shared(job, VOLTA, TURING)


@pytest.mark.usefixtures("searched")
@pytest.mark.parametrize("precision", ["fp16", "fp32"])
def test_workspaces_come_behind_the_search_of_each_pass(precision):
    job = Convolves(precision=precision)
    trace, its = check_shared(job, TURING, VOLTA)
    assert (trace.kind == 0).any()
    assert np.array_equal(trace.kind, its.kind)
    pascal = dataclasses.replace(VOLTA, compute_capability=(6, 0))
    trace, its = check_shared(job, pascal, VOLTA)
    assert (len(trace.nbytes) < len(its.nbytes)) == (precision == "fp16")


def test_a_trace_without_scratch_gets_it_back():
    (trace,) = trace_question(Reads(), SHAPE, AMPERE[1]).traces.values()
    bare = without_card_scratch(trace)
    assert len(bare.nbytes) < len(trace.nbytes)
    assert differing(with_card_scratch(bare, AMPERE[1]), trace) == []
    assert without_card_scratch(bare).kind.tolist() == bare.kind.tolist()


def test_one_trace_is_made_and_kept(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("MEMFIT_KEEP_TRACES", "1")
    asked = AskedJob("job", Reads, {})
    with asked:
        asked.predict(SHAPE, AMPERE[0])
    later = AskedJob("job", Reads, {})
    for device in AMPERE:
        assert later.predict(SHAPE, device).footprint == predict(Reads(), "job", SHAPE, device).footprint
    assert (asked.traced, later.traced) == (1, 0)


def test_a_size_follows_where_the_splits_of_the_sizes_around_it_differ():
    asked = AskedJob("job", Reads)
    for items, device in ((2, AMPERE[1]), (5, AMPERE[0]), (9, AMPERE[3])):
        asked.question(Shape(items=items), device)
    for items in (3, 4, 6, 7, 8):
        for device in AMPERE:
            shape = Shape(items=items)
            derived, own = asked.question(shape, device), trace_question(Reads(), shape, device)
            (trace,), (its,) = derived.traces.values(), own.traces.values()
            assert differing(trace, dataclasses.replace(its, operator_bytes=trace.operator_bytes)) == []
            other = answer(derived, "job", AMPERE[-1])  # a derived question is one of every card, too
            assert other.footprint == predict(Reads(), "job", shape, AMPERE[-1]).footprint
    assert asked.traced == 3


class ReadsMore(Reads):
    """Keys that do not grow in proportion."""

    def loss(self, nets, batch):
        with self.autocast(batch.device):
            return self._attended(nets, batch, 1024 + 256 * (len(batch) % 3)).float().sum(), len(batch)


def test_a_size_does_not_follow_where_calls_lie_on_no_line():
    (low,), (middle,), (high,) = (
        trace_question(ReadsMore(), Shape(items=items), CARD).traces.values() for items in (2, 3, 4)
    )
    assert not are_calls_of(middle, calls_between(low, high, (1, 2)))
    asked = AskedJob("job", ReadsMore)
    for items in (2, 5, 9):
        asked.question(Shape(items=items), CARD)
    asked.question(Shape(items=7), CARD)
    assert asked.traced == 4


@pytest.mark.slow
def test_a_page_groups_cards_of_the_same_scratch():
    """A page replays one trace for all cards of a group."""
    asked = AskedJob("job", Reads)
    groups = card_groups(asked, AMPERE, others=AMPERE, trace_others=False)
    keys = [{card.key for card in group.cards} for group in groups]
    assert not any({"rtx3060", "rtx3090"} <= some for some in keys)
    for group in groups:
        for derived in group.kinds:
            for step_range in derived.ranges:
                for card in group.cards:
                    shape = Shape(items=step_range.low, length=derived.kind.length)
                    modes = {} if derived.kind.checkpoint == "none" else asked.facts.every
                    times = 2 if derived.kind.accumulated else 1
                    own = predict(Reads(), "job", shape, card, micro_batches=times, checkpointing=modes)
                    assert np.array_equal(own.trace.nbytes, step_range.trace.nbytes)


def test_a_kept_question_says_its_calls(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("MEMFIT_KEEP_TRACES", "1")
    question = trace_question(Reads(), SHAPE, CARD)
    shelf = Shelf("job", {}, fresh=False)
    shelf.add("question", question)
    shelf.keep(loaded=True)
    kept = Shelf("job", {}, fresh=False).find("question", AMPERE[-1])
    assert kept is not None
    assert differing(kept.traces[0], question.traces[0]) == []
