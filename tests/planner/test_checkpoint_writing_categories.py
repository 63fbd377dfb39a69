"""A plan's file whose phases lack categories, as after an edit by hand."""

from dataclasses import replace

import pytest

from memfit.errors import InputError
from memfit.plan import read_plan, write_plan
from memfit.planner.checkpoint_writing import copy_bytes
from tests.train.test_reduced_limits import PLAN


def with_phase(name, **values):
    phase = {"allocated_bytes": 1, "process_bytes": 2, **values}
    return replace(PLAN, checkpoint_writing="asynchronous", phases={name: phase})


@pytest.mark.parametrize(
    ("plan", "nbytes"),
    [
        (with_phase("train"), 0),
        (with_phase("validate"), 0),
        (with_phase("save", categories={"buffers": 8, "optimizer": 4}), 6),
    ],
    ids=["no categories", "no phase of training", "some categories"],
)
def test_the_copy_is_that_of_the_categories_that_are_there(plan, nbytes):
    assert copy_bytes(plan) == nbytes


@pytest.mark.parametrize("categories", ["text", {"buffers": "8"}, {"buffers": 0.5}], ids=str)
def test_categories_of_another_kind_are_refused(tmp_path, categories):
    write_plan(with_phase("train", categories=categories), tmp_path / "plan.toml")
    with pytest.raises(InputError, match=r"phases\.train\.categories: not a table of whole numbers"):
        read_plan(tmp_path / "plan.toml")
