"""python -m pytest tests/planner/test_engine_candidates.py"""

import pytest

from memfit.errors import InputError
from memfit.planner.search.engine_choice import engine_candidates


def test_one_device_is_planned_without_ranks_and_several_with_replicas_and_with_shards():
    assert engine_candidates(None, 1) == ("single",)
    assert engine_candidates(None, 2) == ("ddp", "fsdp2")
    assert engine_candidates(None, 64) == ("ddp", "fsdp2")


def test_an_engine_that_is_asked_for_is_the_only_one():
    assert engine_candidates("zero2", 4) == ("zero2",)
    assert engine_candidates("single", 1) == ("single",)


@pytest.mark.parametrize(("engine", "devices"), [("single", 2), ("ddp", 1), ("megatron", 2)])
def test_an_engine_that_does_not_go_with_the_devices_is_refused(engine, devices):
    with pytest.raises(InputError):
        engine_candidates(engine, devices)
