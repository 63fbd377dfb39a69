"""What is traced after an answer, for the next questions: other micro-batches and other cards.

python -m pytest tests/planner/test_trace_ahead.py
"""

import pytest
import torch
import torch.nn.functional as F

from memfit.device.hardware.catalogue import catalogue, find_device
from memfit.job import Shape
from memfit.planner.asked_job import AskedJob
from memfit.planner.predict import predict, trace_question
from memfit.planner.prediction import holds_for
from memfit.planner.trace_ahead import AheadTraces
from memfit.trace.card_calls import trace_on
from testing.large_nets import Decoder, Dit, UNet
from testing.linear_layer import LinearLayer
from testing.nets import JOBS
from tests.trace.test_second_window import differing

CARD = find_device("rtx4090")


def traced_ahead(asked, shape, device):
    """Traces what answers for other micro-batches and for the other cards."""
    ahead = AheadTraces(asked)
    ahead.trace_sizes(shape, device)
    ahead.trace_cards(shape, device)


def test_every_card_and_micro_batch_follows_from_what_is_traced_ahead():
    asked, shape = AskedJob("linear", LinearLayer), Shape(items=3)
    traced_ahead(asked, shape, CARD)
    traced = asked.traced
    for card in catalogue().values():
        if card.is_cuda and card.usable_bytes:
            asked.predict(shape, card)
    for items in (1, 2, 5, 1000, 60_000):
        prediction = asked.predict(Shape(items=items), CARD)
        assert prediction.footprint == predict(LinearLayer(), "linear", Shape(items=items), CARD).footprint
    assert asked.traced == traced <= 6


class Copies(LinearLayer):
    """From 64 samples on, the batch is copied."""

    def loss(self, nets, batch):
        x = batch["x"].clone() if len(batch["x"]) >= 64 else batch["x"]
        return nets["net"](x).square().sum(), len(x)


class AsksItsCard(Copies):
    """Copies, with a trace of its own for each compute capability."""

    def loss(self, nets, batch):
        torch.cuda.get_device_capability()
        return super().loss(nets, batch)


def test_both_sides_of_a_change_follow_on_cards_of_every_kind():
    asked = AskedJob("copies", AsksItsCard)
    ahead = AheadTraces(asked)
    ahead.trace_sizes(Shape(items=1), CARD)
    first = asked.traced
    others = ahead.trace_cards(Shape(items=1), CARD)
    assert others
    before = asked.traced
    for card in others:
        ahead.trace_sizes(Shape(items=1), card)
    traced = asked.traced
    assert traced - before < len(others) * first / 2  # the change is not searched for again
    for card in (CARD, *others):
        for items in (2, 3, 50, 63, 64, 66, 500, 1000, 40_000):
            assert asked.predict(Shape(items=items), card).micro_batch == items
    for items in (50, 63, 64, 500):
        prediction = asked.predict(Shape(items=items), others[0])
        assert prediction.footprint == predict(AsksItsCard(), "copies", Shape(items=items), others[0]).footprint
    assert asked.traced == traced


class Attends(LinearLayer):
    """Attention in half precision over one head of 8 channels."""

    def batch(self, shape):
        return {"x": torch.zeros(shape.items, 1, 16, 8)}

    def loss(self, nets, batch):
        x = nets["net"](batch["x"]).half()
        return F.scaled_dot_product_attention(x, x, x).float().square().sum(), len(x)


def test_before_the_answer_a_card_of_other_kernels_comes_first_then_another_size():
    """Cards that may share the answer's trace come when that is there."""
    asked, goes_on = AskedJob("attends", Attends), iter([True, True, False])
    AheadTraces(asked, lambda: next(goes_on)).trace_meanwhile(Shape(items=3), find_device("rtx3090"))
    before = asked.traced
    for items, card in ((3, "t4"), (2, "rtx3090")):
        asked.predict(Shape(items=items), find_device(card))
    assert asked.traced == before


class Wide(LinearLayer):
    """Samples of 64 MiB, of which a card holds a few hundred."""

    def batch(self, shape):
        return {"x": torch.zeros(shape.items, 1 << 21, 8)}


def test_micro_batches_that_no_card_holds_follow_too():
    asked = AskedJob("wide", Wide)
    ahead = AheadTraces(asked)
    ahead.trace_sizes(Shape(items=1), CARD)
    for card in (CARD, *ahead.trace_cards(Shape(items=1), CARD)):
        ahead.trace_sizes(Shape(items=1), card, times=16)
        traced = asked.traced
        for items in (700, 3000):
            prediction = asked.predict(Shape(items=items), card)
            assert prediction.footprint == predict(Wide(), "wide", Shape(items=items), card).footprint
            assert prediction.footprint.verdict == "no"
        assert asked.traced == traced


def test_nothing_is_traced_ahead_for_a_cpu():
    asked = AskedJob("linear", LinearLayer)
    traced_ahead(asked, Shape(items=3), find_device("cpu"))
    assert asked.traced == 0


def test_steps_that_the_job_refuses_are_left_out():
    class One(LinearLayer):
        def batch(self, shape):
            if shape.items > 1:
                raise ValueError("one item alone")
            return super().batch(shape)

    asked = AskedJob("one", One)
    traced_ahead(asked, Shape(items=1), CARD)
    traced = asked.traced
    asked.predict(Shape(items=1), find_device("h100"))
    assert asked.traced == traced > 0


def cards_by_capability():
    """A card of each compute capability of the catalogue."""
    cards = {card.compute_capability: card for card in catalogue().values() if card.is_cuda and card.usable_bytes}
    return list(cards.values())


@pytest.mark.parametrize(
    "job",
    [
        Dit(dim=64, depth=1, heads=4, frames=64), Dit(dim=64, depth=1, heads=4, frames=64, precision="bf16"),
        Dit(dim=64, depth=1, heads=4, frames=64, precision="fp16"),
        Dit(dim=208, depth=1, heads=1, frames=64, precision="bf16"),
        Decoder(dim=64, depth=1, heads=2, length=64, precision="bf16"), JOBS["unet"](precision="fp16"),
        JOBS["convolution"](),
        pytest.param(UNet(widths="32,32,32,32", side=16, precision="fp16"), marks=pytest.mark.slow),
    ],
    ids=["dit", "dit bf16", "dit fp16", "wide heads", "decoder", "unet", "convolution", "diffusers"],
)  # fmt: skip
def test_cards_that_share_a_trace_need_what_a_trace_of_their_own_says(job):
    """Two cards share a trace where they answer alike whatever the trace asked of its card."""
    shape, shared = Shape(items=2, length=job.longest and 40), 0
    questions = [(card, trace_question(job, shape, card)) for card in cards_by_capability()]
    for first, question in questions:
        for other, own in questions:
            if other is not first and holds_for(question, other):
                shared += 1
                (trace,), (its,) = question.traces.values(), own.traces.values()
                assert differing(trace_on(trace, other), its) == []
    assert shared
