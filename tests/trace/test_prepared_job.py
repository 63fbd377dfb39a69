"""A job that was set up beforehand is traced as one that is set up for its trace."""

import pytest
import torch

from memfit.device.hardware.catalogue import find_device
from memfit.device.virtual.backend import is_inside
from memfit.job import Shape
from memfit.planner.predict import plain_nets, trace_question
from memfit.trace.prepared_job import leave_prepared
from memfit.trace.step import prepare
from tests.trace.test_second_window import Attends, Norms, differing

CARD = find_device("rtx4090")


class AsksItsCard(Norms):
    """Nets that are wider on newer cards."""

    def nets(self):
        newer = torch.cuda.get_device_capability()[0] >= 9
        return {"net": torch.nn.Linear(8, 32 if newer else 16)}


@pytest.fixture(autouse=True)
def nothing_stays_open():
    yield
    leave_prepared()


def question(job, items, key):
    return trace_question(job, Shape(items=items), find_device(key), checkpointing={}, sizes=())


@pytest.mark.parametrize("key", ["rtx4090", "h100", "t4"])
def test_it_answers_for_every_card_and_size(key):
    job = Attends()
    alone = question(job, 3, key)
    prepare(job, CARD)
    assert is_inside()
    prepared = question(job, 3, key)
    assert not is_inside()
    assert differing(prepared.traces[0], alone.traces[0]) == []
    assert prepared.facts == alone.facts


@pytest.mark.parametrize("key", ["a100-80gb", "h100"])
def test_setup_that_asks_its_card_counts_for_cards_that_answer_the_same(key):
    job = AsksItsCard()
    alone = question(job, 3, key)
    prepare(job, CARD)
    prepared = question(job, 3, key)
    assert not is_inside()
    assert differing(prepared.traces[0], alone.traces[0]) == []
    assert prepared.facts == alone.facts
    assert "compute_capability" in prepared.facts


def test_another_job_ends_it():
    prepare(Norms(), CARD)
    other = Attends()
    trace = question(other, 3, "rtx4090").traces[0]
    assert not is_inside()
    assert differing(trace, question(other, 3, "rtx4090").traces[0]) == []


def test_a_trace_on_the_cpu_ends_it():
    job = Norms()
    prepare(job, CARD)
    trace = question(job, 3, "cpu").traces[0]
    assert not is_inside()
    assert differing(trace, question(job, 3, "cpu").traces[0]) == []


def test_nets_that_are_read_end_it():
    job = Norms()
    prepare(job, CARD)
    assert plain_nets(job).keys() == {"net"}
    assert not is_inside()
