"""pytest tests/audit/test_right.py: no false alarm."""

import pytest

from memfit.audit import audit
from tests.audit import right
from tests.audit.collect import targets

TARGETS = targets(right)


@pytest.mark.parametrize("name", TARGETS)
def test_nothing_is_found(name) -> None:
    worlds = (1,) if name.startswith("one_rank") else (1, 2, 3, 8)
    audited = audit(TARGETS[name], worlds)
    assert audited.ok, audited.findings
    for world, counts in audited.counts.items():
        assert len(counts.batches_per_rank) == world
        assert counts.distinct > 0


def test_the_targets_are_many() -> None:
    assert len(TARGETS) > 45
