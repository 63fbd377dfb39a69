"""pytest tests/batch/audit/test_right.py: no false alarm."""

import inspect

import pytest

from memfit.batch.audit import audit
from tests.batch.audit import right

TARGETS = [
    name for name, function in vars(right).items()
    if inspect.isfunction(function) and function.__module__ == right.__name__ and not name.startswith("_")
]  # fmt: skip


@pytest.mark.parametrize("name", TARGETS)
def test_nothing_is_found(name) -> None:
    worlds = (1,) if name.startswith("one_rank") else (1, 2, 3, 8)
    found = audit(getattr(right, name), worlds)
    assert found.ok, found.findings
    for world, counts in found.counts.items():
        assert len(counts.batches_per_rank) == world
        assert counts.distinct > 0


def test_the_targets_are_many() -> None:
    assert len(TARGETS) > 45
