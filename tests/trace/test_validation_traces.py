"""Several policies for validation traced behind the same windows are what each gives when it is traced alone."""

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
from memfit.trace.validation_traces import trace_policies
from tests.planner.test_offload_options import CARD
from tests.planner.test_options import Validated


@pytest.mark.parametrize("zero_grad", ["after_step", "after_forward"])
def test_each_policy_is_as_it_is_alone(zero_grad):
    job, shape = Validated(zero_grad=zero_grad), Shape(items=2)
    how = Tracing(device=CARD, saving=PhasePolicy(), validation=PhasePolicy())
    asked = list(validation_policies(job))
    assert len(asked) > 3
    alone = [footprint_on(trace_job(job, shape, replace(how, validation=item)), CARD) for item in asked]
    together = [footprint_on(item.trace, CARD) for item in trace_policies(job, shape, how, asked)]
    assert together == alone
    assert len({item.phases["validate"].allocated_bytes for item in together if "validate" in item.phases}) > 1


def test_a_validation_takes_the_seconds_of_its_own_operators():
    job, shape, card = Validated(), Shape(items=2), find_device("rtx3090")
    how = Tracing(device=card, saving=PhasePolicy(), validation=PhasePolicy())
    for policy in trace_policies(job, shape, how, [PhasePolicy(), PhasePolicy(items=1)]):
        trace = policy.trace
        parts = np.array(trace.parts)[trace.operator_part].tolist()
        last = len(parts) - parts[::-1].index("validate")
        first = next(row for row in range(last, 0, -1) if parts[row - 1] not in ("fetch", "validate"))
        if policy.policy.items is not None:  # no operator runs between this validation and the one before it
            first += parts[first:].index("fetch", parts[first:].index("validate"))
        own = operator_seconds(trace, card, job.precision)[first:last]
        assert seconds_of(policy, card, job.precision) == pytest.approx(own.sum(), rel=1e-12)
        assert len(own) == 18
