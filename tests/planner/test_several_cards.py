"""One question for several cards: a second core takes half of the replays, and a size follows once for all cards alike.

python -m pytest tests/planner/test_several_cards.py
"""

import os
import signal

import pytest

from memfit.device.hardware.catalogue import catalogue, find_device, with_memory
from memfit.job import Shape
from memfit.planner import asked_job, several_cards
from memfit.planner.asked_job import AskedJob
from memfit.planner.predict import predict
from memfit.planner.several_cards import predict_each
from memfit.planner.trace_ahead import AheadTraces
from testing.large_nets import Dit
from testing.linear_layer import LinearLayer

CARDS = [card for card in catalogue().values() if card.is_cuda and card.usable_bytes]
SHAPE = Shape(items=3)


@pytest.fixture
def replayed_here(monkeypatch):
    """The cards that this process replays, where a second core is asked whatever the work."""
    here, footprints_of = [], several_cards.footprints_of

    def noted(question, device):
        here.append(device.key)
        return footprints_of(question, device)

    monkeypatch.setattr(several_cards, "WORTH_A_COPY", 0)
    monkeypatch.setattr(several_cards, "has_core_for_copy", lambda: True)
    monkeypatch.setattr(several_cards, "footprints_of", noted)
    return here


def test_a_second_core_replays_a_part_and_every_answer_is_that_of_predict(replayed_here):
    cards = [*CARDS, with_memory(find_device("t4"), 1 << 20), with_memory(find_device("cpu"), 1 << 30)]
    predictions = predict_each(AskedJob("linear", LinearLayer), SHAPE, cards)
    assert 0 < len(replayed_here) < len(cards)
    assert [prediction.device for prediction in predictions] == cards
    for prediction, card in zip(predictions, cards, strict=True):
        assert prediction.footprint == predict(LinearLayer(), "linear", SHAPE, card).footprint
        assert prediction.seconds > 0
    assert not predictions[-2].footprint.fits


def test_what_the_second_core_has_not_given_is_replayed_here(replayed_here, monkeypatch):
    noted, parent = several_cards.footprints_of, os.getpid()

    def dying(question, device):
        if os.getpid() != parent:
            os.kill(os.getpid(), signal.SIGKILL)
        return noted(question, device)

    monkeypatch.setattr(several_cards, "footprints_of", dying)
    predictions = predict_each(AskedJob("linear", LinearLayer), SHAPE, CARDS)
    assert {card.key for card in CARDS} == {*replayed_here}
    assert [prediction.device for prediction in predictions] == CARDS


def test_little_work_asks_no_second_core(replayed_here, monkeypatch):
    monkeypatch.setattr(several_cards, "WORTH_A_COPY", 1 << 30)
    predict_each(AskedJob("linear", LinearLayer), SHAPE, CARDS)
    assert len(replayed_here) == len(CARDS)


def test_a_single_card_asks_no_second_core(replayed_here, monkeypatch):
    monkeypatch.setattr(several_cards, "with_copy", None)
    predict_each(AskedJob("linear", LinearLayer), SHAPE, CARDS[:1])
    assert replayed_here == [CARDS[0].key]


def test_a_size_between_traced_ones_follows_once_for_all_cards_alike(monkeypatch):
    """Attention whose scratch differs from card to card, and whose kernels are others on Hopper."""
    job = Dit(dim=64, depth=1, heads=4, frames=64, precision="bf16")
    derived, question_between = [], asked_job.question_between

    def noted(known, shape, device):
        derived.append(device.key)
        return question_between(known, shape, device)

    asked, shape, first = AskedJob("dit", lambda: job), Shape(items=2, length=40), find_device("rtx4090")
    ahead = AheadTraces(asked)
    for card in (first, *ahead.trace_cards(shape, first)):
        ahead.trace_sizes(shape, card)
    monkeypatch.setattr(asked_job, "question_between", noted)
    traced, between = asked.traced, Shape(items=57, length=40)
    predictions = predict_each(asked, between, CARDS)
    assert asked.traced == traced
    assert len(derived) < len(CARDS) / 3
    for prediction, card in zip(predictions, CARDS, strict=True):
        if card.key in ("t4", "l4", "a100-40gb", "h100", "b200", "rtx5090"):
            assert prediction.footprint == predict(job, "dit", between, card).footprint
