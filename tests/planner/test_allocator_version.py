"""A trace is replayed by the rules of the torch that the job runs under."""

import numpy as np
import pytest

from memfit.device.hardware.catalogue import find_device
from memfit.events import ALLOCATE, FREE, Trace
from memfit.planner.prediction import footprint_on

MIB = 1 << 20
MADE = ((0, 48), (1, 24), (2, 24), (3, 24), (4, 24), (5, 48))
"""Storages and their MiB."""
EVENTS = (0, ~0, 1, 2, 3, ~2, ~3, 4, ~1, 5, ~4, ~5)
"""Storage 4 finds two free blocks of 24 MiB: behind storage 1, in the older segment, and the whole younger one. Only if
it takes the younger is the older whole when storage 5 asks for 48 MiB."""


def trace() -> Trace:
    events, storages = len(EVENTS), len(MADE)
    return Trace(
        kind=np.array([ALLOCATE if event >= 0 else FREE for event in EVENTS], np.int8),
        storage=np.array([event if event >= 0 else ~event for event in EVENTS], np.int32),
        operator=np.zeros(events, np.int32), nbytes=np.array([mib * MIB for _, mib in MADE], np.int64),
        category=np.zeros(storages, np.uint8), stream=np.zeros(storages, np.uint8),
        made_by=np.zeros(storages, np.int32), operator_name=np.zeros(1, np.int32),
        operator_module=np.zeros(1, np.int32), operator_part=np.zeros(1, np.int32),
        operator_flops=np.zeros(1, np.int64), operator_bytes=np.zeros(1, np.int64),
        names=("op",), modules=("net",), parts=("forward",),
        phases=(("train", 0, events),),
    )  # fmt: skip


@pytest.mark.parametrize(("torch_version", "mib"), [("2.6.0", 72), ("2.11.0+cu128", 72), ("2.13.0", 120)])
def test_which_of_two_equal_blocks_is_taken_follows_the_version_of_torch(torch_version: str, mib: int) -> None:
    footprint = footprint_on(trace(), find_device("rtx4090"), torch_version=torch_version)
    assert footprint.phases["train"].reserved_bytes == mib * MIB
