"""Policies that a plan leaves come to the same whether one process traces them or a copy traces half. Real forks.

python -m pytest tests/planner/test_validation_choice.py
"""

import os
import random
from contextlib import closing
from typing import ClassVar

import pytest

from memfit.device.hardware.catalogue import find_device
from memfit.forked_process import ForkedCall, NoResultError
from memfit.job import Shape
from memfit.plan import PhasePolicy
from memfit.planner.options.validation_policies import other_policies
from memfit.planner.search import second_core
from memfit.planner.search.validation_choice import OtherPolicies, Validation
from memfit.trace.step import Tracing
from memfit.trace.validation_traces import PolicyTraces, open_policy_traces
from tests.planner.test_options import Deep

CARD = find_device("rtx3090")
SHAPE = Shape(items=8)


class Sliced(Deep):
    """Three options; slices of one item make a loop whose turns are traced by few of them."""

    at_once: int = 8
    sums: bool = False
    validation_options: ClassVar = {"sliced decode": {"at_once": 1}, "sums": {"sums": True}}

    def validate(self, nets, batch):
        parts = batch[1:].split(self.at_once)
        with self.autocast(batch.device):
            for index in self.repeats(len(parts)):
                made = nets["net"](parts[index]).repeat(1, 1, 64)
                made.sum() if self.sums else made.mean()
        return {}


class Refusing(Sliced):
    refused: str = "sums"

    def validate(self, nets, batch):
        if getattr(self, self.refused) != getattr(type(self), self.refused):
            raise ValueError(f"not with {self.refused}")
        return super().validate(nets, batch)


class Drawn(Sliced):
    def validate(self, nets, batch):
        random.random()
        return super().validate(nets, batch)


class Parted(Sliced):
    first = os.getpid()

    def validate(self, nets, batch):
        if os.getpid() != self.first:
            raise ValueError("not in a copy")
        return super().validate(nets, batch)


HOW = Tracing(device=CARD, saving=PhasePolicy(), validation=PhasePolicy())
OTHERS = ["sliced decode", "sums", "smaller validation batch", "precision in validation"]


def outcomes(job, second_core, *, begun=False):
    """(what the policies come to, what the process itself traced).

    Args:
        begun: whether a copy begins before the first policy is traced.
    """
    traced_here, trace = [], PolicyTraces.trace
    others = other_policies(job, PhasePolicy(), SHAPE.items, None)
    assert list(others) == OTHERS

    def noted(self, policy, seen=None):
        traced_here.append(policy)
        return trace(self, policy, seen)

    with (
        pytest.MonkeyPatch.context() as patch,
        open_policy_traces(job, HOW) as traces,
        closing(OtherPolicies(job, traces, CARD)) as other,
    ):
        patch.setattr(PolicyTraces, "trace", noted)
        traces.run_windows(SHAPE, HOW)
        if begun:
            other.begin(others)
        operators = traces.trace(PhasePolicy()).operators
        policies = other.outcomes(others, operators, second_core=second_core)
    return policies, len(traced_here) - 1


@pytest.fixture(autouse=True)
def two_cores(monkeypatch):
    monkeypatch.setattr(second_core, "available_cores", lambda: 2)
    monkeypatch.setattr(second_core, "is_forkable", lambda: True)  # other tests may have left threads


@pytest.fixture
def results(monkeypatch):
    """What copies gave: a result, or None where there was none."""
    given, result = [], ForkedCall.result

    def noted(call):
        given.append(None)
        given[-1] = result(call)
        return given[-1]

    monkeypatch.setattr(ForkedCall, "result", noted)
    return given


def without_rounding(outcomes):
    """A validation's seconds are a sum over all that was traced before it too, whose addends there are 0."""
    return {
        name: (outcome.policy, outcome.peak, pytest.approx(outcome.seconds, rel=1e-12))
        if isinstance(outcome, Validation) else outcome
        for name, outcome in outcomes.items()
    }  # fmt: skip


def test_a_copy_traces_half_of_them(results):
    alone, count = outcomes(Sliced(), second_core=False)
    assert (count, results) == (4, [])
    both, count = outcomes(Sliced(), second_core=True)
    assert count == 2
    assert [result.policy.settings for result in results] == [{"sums": True}, {"precision": "bf16"}]
    assert without_rounding(both) == without_rounding(alone)
    assert list(both) == list(alone)


def test_a_copy_begins_beside_the_first_policy(results):
    alone, _ = outcomes(Sliced(), second_core=False)
    both, count = outcomes(Sliced(), second_core=True, begun=True)
    assert (count, len(results)) == (1, 3)
    assert without_rounding(both) == without_rounding(alone)
    assert list(both) == list(alone)


def test_what_a_copy_began_for_another_policy_is_not_taken(results):
    job = Sliced()
    chosen = PhasePolicy(settings={"at_once": 1})
    others = other_policies(job, chosen, SHAPE.items, None)
    with open_policy_traces(job, HOW) as traces, closing(OtherPolicies(job, traces, CARD)) as other:
        traces.run_windows(SHAPE, HOW)
        other.begin(other_policies(job, PhasePolicy(), SHAPE.items, None))
        traces.trace(PhasePolicy())
        operators = traces.trace(chosen).operators
        policies = other.outcomes(others, operators, second_core=True)
    assert {name: outcome.policy for name, outcome in policies.items()} == others
    assert len(results) == len(others) // 2


@pytest.mark.parametrize("begun", [False, True])
@pytest.mark.parametrize("refused", ["at_once", "sums", "precision"])
def test_after_one_that_fails_none_is_known(refused, begun):
    alone, _ = outcomes(Refusing(refused=refused), second_core=False)
    both, _ = outcomes(Refusing(refused=refused), second_core=True, begun=begun)
    assert without_rounding(both) == without_rounding(alone)
    unknown = sum(isinstance(outcome, str) for outcome in both.values())
    assert unknown == {"at_once": 4, "sums": 3, "precision": 1}[refused]
    assert f"not with {refused}" in list(both.values())[-1]


@pytest.mark.parametrize("begun", [False, True])
@pytest.mark.parametrize("job", [Drawn, Parted])
def test_a_copy_that_fails_leaves_all_to_the_process(job, results, begun):
    both, count = outcomes(job(), second_core=True, begun=begun)
    assert count == 4
    assert results == [None] * (3 if begun else 2)
    assert without_rounding(both) == without_rounding(outcomes(job(), second_core=False)[0])


def test_nothing_is_said_of_one_that_neither_could_trace(results):
    class Both(Parted, Refusing):
        refused: str = "at_once"

    with pytest.raises(NoResultError):
        outcomes(Both(), second_core=True)
    assert results == [None, None]
