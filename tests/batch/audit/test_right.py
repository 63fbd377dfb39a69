"""pytest tests/batch/audit/test_right.py: no false alarm."""

import inspect

import pytest
import right

from memfit.batch.audit import audit

TARGETS = [
    name for name, function in vars(right).items()
    if inspect.isfunction(function) and function.__module__ == "right" and not name.startswith("_")
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
