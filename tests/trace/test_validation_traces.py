"""Several policies for validation traced behind the same windows are what each gives when it is traced alone."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import pytest

from memfit.device.hardware.catalogue import find_device
from memfit.job import Shape
from memfit.plan import PhasePolicy
from memfit.planner.options.validation_policies import validation_policies
from memfit.planner.predict import footprint_on
from memfit.planner.search.validation_choice import seconds_of
from memfit.planner.timing.roofline import operator_seconds
from memfit.trace.step import Tracing, trace_job
from memfit.trace.validation_traces import PolicyTraces, open_policy_traces
from tests.planner.test_offload_options import CARD
from tests.planner.test_options import Validated

HOW = Tracing(device=CARD, saving=PhasePolicy(), validation=PhasePolicy())


@contextmanager
def policy_traces(job, shape, how=HOW) -> Iterator[PolicyTraces]:
    with open_policy_traces(job, how) as traces:
        traces.run_windows(shape, how)
        yield traces


class Looping(Validated):
    """Validates in a loop of the same turns, and in one whose last turn is shorter where a setting says so."""

    ragged: bool = False

    def validate(self, nets, batch):
        with self.autocast(batch.device):
            for index in self.repeats(6):
                rows = 1 if self.ragged and index == 5 else len(batch)
                nets["net"](batch[:rows])
        return {}


@pytest.mark.parametrize("zero_grad", ["after_step", "after_forward"])
def test_each_policy_is_as_it_is_alone(zero_grad):
    job, shape = Validated(zero_grad=zero_grad), Shape(items=2)
    asked = list(validation_policies(job))
    assert len(asked) > 3
    alone = [footprint_on(trace_job(job, shape, replace(HOW, validation=item)), CARD) for item in asked]
    with policy_traces(job, shape) as traces:
        together = [footprint_on(traces.trace(item).trace, CARD) for item in asked]
    assert together == alone
    assert len({item.phases["validate"].allocated_bytes for item in together if "validate" in item.phases}) > 1


def test_a_validation_takes_the_seconds_of_its_own_operators():
    job, shape, card = Validated(), Shape(items=2), find_device("rtx3090")
    how = Tracing(device=card, saving=PhasePolicy(), validation=PhasePolicy())
    with policy_traces(job, shape, how) as traces:
        policies = [traces.trace(PhasePolicy()), traces.trace(PhasePolicy(items=1))]
    for policy in policies:
        trace = policy.trace
        parts = np.array(trace.parts)[trace.operator_part].tolist()
        last = len(parts) - parts[::-1].index("validate")
        first = next(row for row in range(last, 0, -1) if parts[row - 1] not in ("fetch", "validate"))
        if policy.policy.items is not None:  # no operator runs between this validation and the one before it
            first += parts[first:].index("fetch", parts[first:].index("validate"))
        own = operator_seconds(trace, card, job.precision)[first:last]
        assert seconds_of(policy, card, job.precision) == pytest.approx(own.sum(), rel=1e-12)
        assert len(own) == 18


def test_a_turn_is_left_out_only_under_the_policy_that_showed_it_to_be_alike():
    ragged, shape = PhasePolicy(settings={"ragged": True}), Shape(items=4)
    with policy_traces(Looping(), shape) as traces:
        alone = traces.trace(ragged)
    with policy_traces(Looping(), shape) as traces:
        traces.trace(PhasePolicy())
        behind = traces.trace(ragged)
    assert behind.turns[behind.turns > 0].tolist() == alone.turns[alone.turns > 0].tolist()
    assert set(alone.turns.tolist()) == {0, 1, 4}


def test_nothing_is_traced_behind_a_validation_that_raised():
    class Refusing(Validated):
        def validate(self, nets, batch):
            raise ValueError("not so")

    with policy_traces(Refusing(), Shape(items=2)) as traces:
        with pytest.raises(ValueError, match="not so"):
            traces.trace(PhasePolicy())
        with pytest.raises(RuntimeError, match="behind a validation that raised"):
            traces.trace(PhasePolicy(items=1))
