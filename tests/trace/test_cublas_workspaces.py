"""Cards whose cuBLAS workspaces alone differ share a trace, and each has its own workspaces."""

import os
from dataclasses import replace

import numpy as np
import pytest

from memfit.device.hardware.catalogue import find_device
from memfit.events import CATEGORIES
from memfit.job import Shape
from memfit.planner.asked_job import AskedJob
from memfit.planner.predict import predict, trace_question
from memfit.planner.prediction import answer, holds_for
from memfit.trace.cublas_workspaces import with_workspaces_of
from tests.trace.test_second_window import Attends, Norms, differing

AMPERE, BLACKWELL = find_device("rtx4090"), find_device("rtx5090")
SHAPE = Shape(items=3)


@pytest.mark.parametrize("job", [Norms(), Attends()], ids=["norms", "attends"])
@pytest.mark.parametrize(("traced_on", "device"), [(AMPERE, BLACKWELL), (BLACKWELL, AMPERE)], ids=["larger", "smaller"])
def test_a_shared_trace_answers_as_its_own(job, traced_on, device):
    question = trace_question(job, SHAPE, traced_on)
    assert holds_for(question, device)
    shared, own = answer(question, "job", device), predict(job, "job", SHAPE, device)
    assert shared.footprint == own.footprint
    assert differing(shared.trace, own.trace) == []
    other = answer(question, "job", traced_on).footprint
    assert abs(own.footprint.phases["train"].process_bytes - other.phases["train"].process_bytes) > 40 << 20


def test_one_trace_is_made():
    asked = AskedJob("job", Norms)
    for key in ("rtx4090", "rtx5090", "h100"):
        asked.predict(SHAPE, find_device(key))
    assert asked.traced == 1


def test_cards_that_have_another_kernel_alone_are_traced():
    assert not holds_for(trace_question(Attends(), SHAPE, AMPERE), find_device("t4"))


def test_bytes_that_the_environment_sets_are_kept(monkeypatch):
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8")
    trace = trace_question(Norms(), SHAPE, AMPERE).traces[0]
    workspaces = trace.nbytes[trace.category == CATEGORIES.index("workspace")]
    assert workspaces.tolist() == [16 * 8 * 1024] * 2
    assert with_workspaces_of(trace, BLACKWELL) is trace


def test_a_cards_bytes_that_the_environment_set_are_kept_where_it_says_so_no_more(monkeypatch):
    """A kept trace is replayed without the job's code, which may have set the variable."""
    with monkeypatch.context() as patch:
        patch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # the bytes of a Hopper's
        trace = trace_question(Norms(), SHAPE, AMPERE).traces[0]
    assert with_workspaces_of(trace, AMPERE) is with_workspaces_of(trace, BLACKWELL) is trace
    own = trace_question(Norms(), SHAPE, AMPERE).traces[0]
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8")
    assert differing(with_workspaces_of(own, BLACKWELL), own) == ["nbytes"]


class SetsWorkspace(Norms):
    """Sets what is no card's before its first product."""

    def loss(self, nets, batch):
        os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":65536:8"
        return super().loss(nets, batch)


def test_what_a_job_sets_in_its_step_is_its_own(monkeypatch):
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    before, sets = (predict(job, "job", SHAPE, BLACKWELL) for job in (Norms(), SetsWorkspace()))
    after = predict(Norms(), "job", SHAPE, BLACKWELL)
    assert after.footprint == before.footprint
    assert sets.footprint.phases["train"].categories["workspace"] == 2 * 8 * (64 << 20)
    assert "CUBLAS_WORKSPACE_CONFIG" not in os.environ


def test_bytes_that_are_no_cards_are_kept():
    """As of torch's versions that had no workspace."""
    trace = trace_question(Norms(), SHAPE, AMPERE).traces[0]
    without = replace(trace, nbytes=np.where(trace.category == CATEGORIES.index("workspace"), 0, trace.nbytes))
    assert with_workspaces_of(without, BLACKWELL) is without


@pytest.mark.parametrize("device", [AMPERE, BLACKWELL], ids=["smaller", "larger"])
def test_a_size_follows_from_traces_that_were_made_on_cards_of_other_workspaces(device):
    asked = AskedJob("job", Norms)
    for items, card in ((2, AMPERE), (5, BLACKWELL), (9, AMPERE)):
        asked.question(Shape(items=items), card)
    derived = asked.question(Shape(items=7), device)
    assert asked.traced == 3
    assert answer(derived, "job", device).footprint == predict(Norms(), "job", Shape(items=7), device).footprint
