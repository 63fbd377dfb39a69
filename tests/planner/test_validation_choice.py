"""Policies that a plan leaves come to the same whether one process traces them or copies do. Real forks.

python -m pytest tests/planner/test_validation_choice.py
"""

import os
import random
import time
from contextlib import closing
from typing import ClassVar

import pytest

from memfit import forked_process
from memfit.device.hardware.catalogue import find_device
from memfit.forked_process import ForkedBranch, NoResultError
from memfit.job import Shape
from memfit.plan import PhasePolicy
from memfit.planner.options.validation_policies import other_policies
from memfit.planner.search import validation_choice
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
        values = super().validate(nets, batch)
        if os.getpid() != self.first:
            raise ValueError("not in a copy")
        return values


class Read(Sliced):
    """Reads a file line by line, a part of it before and a part behind the place where an option is first read."""

    def validate(self, nets, batch):
        with open(__file__) as file:
            before = len(file.readline())
            sliced = self.at_once == 1
            nets["net"](batch[: before + len(file.readline()) + sliced])
        return super().validate(nets, batch)


class Counted(Sliced):
    """Counts its validations on itself, and sums as often: an option's job is a fresh one."""

    def validate(self, nets, batch):
        self.count = vars(self).get("count", 0) + 1
        self.noted = self.at_once
        made = [batch.clone() for _ in range(self.count + self.noted + 10 * (self.at_once == 1))]
        del made
        return super().validate(nets, batch)


class Slow(Sliced):
    def validate(self, nets, batch):
        values = super().validate(nets, batch)
        time.sleep(0.2)
        return values


HOW = Tracing(device=CARD, saving=PhasePolicy(), validation=PhasePolicy())
OTHERS = ["sliced decode", "sums", "smaller validation batch", "precision in validation"]


def outcomes(job, second_core, *, begun=False):
    """(what the policies come to, how many validations the process itself traced beside the first).

    Args:
        begun: whether copies go on from the first policy.
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
        closing(OtherPolicies(job, traces, CARD, second_core=second_core)) as other,
    ):
        patch.setattr(PolicyTraces, "trace", noted)
        traces.run_windows(SHAPE, HOW)
        first = other.trace(PhasePolicy(), others) if begun else traces.trace(PhasePolicy())
        policies = other.outcomes(others, first.operators)
    return policies, len(traced_here) - 1


@pytest.fixture(autouse=True)
def two_cores(monkeypatch):
    for module in (forked_process, validation_choice):
        monkeypatch.setattr(module, "available_cores", lambda: 2)
    monkeypatch.setattr(forked_process, "is_forkable", lambda: True)  # other tests may have left threads


@pytest.fixture
def results(monkeypatch):
    """What copies gave: a result, or None where there was none."""
    given, result = [], ForkedBranch.result

    def noted(branch):
        given.append(None)
        given[-1] = result(branch)
        return given[-1]

    monkeypatch.setattr(ForkedBranch, "result", noted)
    return given


def without_rounding(outcomes):
    """A validation's seconds are a sum over all that was traced before it too, whose addends there are 0."""
    return {
        name: (outcome.policy, outcome.peak, pytest.approx(outcome.seconds, rel=1e-12))
        if isinstance(outcome, Validation) else outcome
        for name, outcome in outcomes.items()
    }  # fmt: skip


@pytest.mark.parametrize("begun", [False, True])
@pytest.mark.parametrize("kind", [Sliced, Read, Counted])
def test_copies_come_to_what_one_process_does(kind, results, begun):
    alone, count = outcomes(kind(), second_core=False)
    assert (count, results) == (4, [])
    both, count = outcomes(kind(), second_core=True, begun=begun)
    is_left = kind is Read and begun  # a file is open where the first option is read: both would read on
    assert count == is_left
    assert [result.policy for result in results] == [
        result.policy for name, result in alone.items() if not (is_left and name == "sliced decode")
    ]
    if kind is Counted:  # without a setting of its own, it is the very job that the first policy's validation counts on
        del alone["smaller validation batch"], both["smaller validation batch"]
    assert without_rounding(both) == without_rounding(alone)
    assert list(both) == list(alone)


def test_a_copy_goes_on_from_where_an_option_is_first_read(tmp_path, results):
    class Noting(Sliced):
        def validate(self, nets, batch):
            self.note("began")
            made = nets["net"](batch[1:])
            self.note("read" if self.sums else "left")
            made.sum() if self.sums else made.mean()
            return {}

        def note(self, word):
            with open(tmp_path / word, "a") as file:
                file.write(f"{os.getpid()}\n")

    both, _ = outcomes(Noting(), second_core=True, begun=True)
    began = (tmp_path / "began").read_text().split()
    copy, mine = (tmp_path / "read").read_text().split(), (tmp_path / "left").read_text().split()
    assert str(os.getpid()) in mine
    assert len(copy) == 1
    assert copy[0] not in began
    assert without_rounding(both) == without_rounding(outcomes(Noting(), second_core=False)[0])


def test_what_copies_began_for_another_policy_is_not_taken(results):
    job = Sliced()
    chosen = PhasePolicy(settings={"at_once": 1})
    others = other_policies(job, chosen, SHAPE.items, None)
    with (
        open_policy_traces(job, HOW) as traces,
        closing(OtherPolicies(job, traces, CARD, second_core=True)) as other,
    ):
        traces.run_windows(SHAPE, HOW)
        other.trace(PhasePolicy(), other_policies(job, PhasePolicy(), SHAPE.items, None))
        operators = traces.trace(chosen).operators
        policies = other.outcomes(others, operators)
    assert {name: outcome.policy for name, outcome in policies.items()} == others
    assert len(results) == len(others)


@pytest.mark.parametrize("begun", [False, True])
def test_no_more_copies_work_than_there_are_cores(monkeypatch, begun):
    working, begin, read = [0], ForkedBranch.begin, ForkedBranch.read

    def begun_one(branch):
        working[0] += 1
        most.append(working[0])
        begin(branch)

    def ended(branch):
        working[0] -= not branch.is_done
        read(branch)

    most = []
    monkeypatch.setattr(ForkedBranch, "begin", begun_one)
    monkeypatch.setattr(ForkedBranch, "read", ended)
    outcomes(Slow(), second_core=True, begun=begun)
    assert len(most) == len(OTHERS)
    assert max(most) == 2


def test_a_validation_that_is_too_long_ends_the_copies_of_what_is_not_asked(monkeypatch, results):
    monkeypatch.setattr(validation_choice, "TRACED", 60)
    alone, _ = outcomes(Sliced(), second_core=False)
    both, _ = outcomes(Sliced(), second_core=True, begun=True)
    known = [name for name, outcome in alone.items() if not isinstance(outcome, str)]
    assert 0 < len(known) < len(OTHERS)
    assert len(results) == len(known)
    assert without_rounding(both) == without_rounding(alone)


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
    assert results == [None] * 4
    assert without_rounding(both) == without_rounding(outcomes(job(), second_core=False)[0])


def test_nothing_is_said_of_one_that_neither_could_trace(results):
    class Both(Refusing, Parted, Read):
        refused: str = "at_once"

        def validate(self, nets, batch):
            with open(__file__):
                return super().validate(nets, batch)

    with pytest.raises(NoResultError):
        outcomes(Both(), second_core=True, begun=True)
    assert results == [None]
