"""pytest tests/planner/test_derived_steps.py: the kinds of steps of a page, and the cards that share them."""

import pytest

from memfit.device.hardware.catalogue import find_device
from memfit.errors import InputError
from memfit.planner.asked_job import AskedJob
from memfit.planner.derived_steps import card_groups, traced_lengths
from memfit.planner.job_reading import facts_of
from testing.linear_layer import LinearLayer


def test_lengths_are_the_longest_its_half_and_its_quarter():
    class Long(LinearLayer):
        longest = 1000

    assert traced_lengths(facts_of(Long())) == (224, 480, 1000)
    assert traced_lengths(facts_of(LinearLayer())) == (None,)


def test_cards_that_run_the_same_kernels_share_traces_and_a_processor_has_none():
    asked = AskedJob("linear", LinearLayer)
    group, other = card_groups(asked, [find_device("rtx4090"), find_device("t4"), find_device("h100")])
    assert {"rtx4090", "l4", "t4"} <= {card.key for card in group.cards}
    assert "h100" in {card.key for card in other.cards}
    with pytest.raises(InputError, match="cards alone"):
        card_groups(asked, [find_device("cpu")])
