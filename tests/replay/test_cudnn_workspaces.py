"""A convolution's workspace that does not fit fails nothing: PyTorch takes a plan of cuDNN that needs less."""

import math

import numpy as np
import pytest

from memfit.device.hardware.catalogue import Device, find_device, with_memory
from memfit.events import ALLOCATE, CATEGORIES, FREE, Trace
from memfit.planner.prediction import footprint_on
from memfit.replay.cudnn_workspaces import OPERATOR, with_double_workspaces
from memfit.replay.margins import WITHOUT_WORKSPACES, margin_of
from memfit.show.snapshot import snapshot
from memfit.show.timeline import reserved

MIB = 1 << 20
NAMES = ("aten.convolution.default", OPERATOR, "aten._scaled_dot_product_flash_attention_backward.default")


def trace(name: str, category: str = "workspace") -> Trace:
    """600 MiB that stay, a request of 700 MiB that is freed at once, and 100 MiB more."""
    return Trace(
        kind=np.array([ALLOCATE, ALLOCATE, FREE, ALLOCATE, FREE, FREE], np.int8),
        storage=np.array([0, 1, 1, 2, 2, 0], np.int32), operator=np.array([0, 1, 1, 0, 0, 0], np.int32),
        nbytes=np.array([600 * MIB, 700 * MIB, 100 * MIB], np.int64),
        category=np.array([CATEGORIES.index(of) for of in ("activations", category, "activations")], np.uint8),
        stream=np.zeros(3, np.uint8), made_by=np.array([0, 1, 0], np.int32),
        operator_name=np.array([0, NAMES.index(name)], np.int32), operator_module=np.zeros(2, np.int32),
        operator_part=np.zeros(2, np.int32), operator_flops=np.zeros(2, np.int64), operator_bytes=np.zeros(2, np.int64),
        names=NAMES, modules=("net",), parts=("backward",), phases=(("train", 0, 6),),
    )  # fmt: skip


def card() -> Device:
    return with_memory(find_device("rtx3060"), 1 << 30)


def test_a_convolution_s_workspace_that_does_not_fit_is_left_out() -> None:
    footprint = footprint_on(trace(OPERATOR), card())
    assert footprint.fits
    assert footprint.phases["train"].reserved_bytes == 700 * MIB
    assert footprint_on(trace(OPERATOR), find_device("rtx3060")).phases["train"].reserved_bytes == 1300 * MIB


@pytest.mark.parametrize(("name", "category"), [(OPERATOR, "activations"), (NAMES[2], "workspace")])
def test_what_else_does_not_fit_fails(name: str, category: str) -> None:
    assert not footprint_on(trace(name, category), card()).fits


def test_timeline_and_snapshot_go_on_behind_it() -> None:
    held, failed = reserved(trace(OPERATOR), card())
    assert failed is None
    assert held.max() == 700 * MIB
    taken = snapshot(trace(OPERATOR), 900 * MIB)
    assert sum(segment["total_size"] for segment in taken["segments"]) == 700 * MIB
    assert reserved(trace(NAMES[2]), card())[1] == 1


def test_the_interval_holds_the_replay_with_twice_the_workspaces() -> None:
    a100 = find_device("a100-40gb")
    train = footprint_on(trace(OPERATOR), a100).phases["train"]
    assert a100.context_high is not None
    doubled = 600 * MIB + 1400 * MIB + a100.context_high
    assert train.reserved_bytes == 1300 * MIB
    assert train.process_bytes_high == math.ceil(doubled * (1 + margin_of(WITHOUT_WORKSPACES).high))
    other = footprint_on(trace(NAMES[2]), a100).phases["train"]
    assert other.process_bytes_high < doubled


def test_larger_workspaces_that_do_not_fit_decide_no_verdict() -> None:
    a100 = find_device("a100-40gb")
    plain = footprint_on(trace(NAMES[2]), a100).phases["train"]
    limited = with_memory(a100, plain.process_bytes_high + MIB)
    convolution = footprint_on(trace(OPERATOR), limited)
    assert convolution.verdict == footprint_on(trace(NAMES[2]), limited).verdict == "yes"
    assert plain.process_bytes_high < convolution.phases["train"].process_bytes_high == limited.usable_bytes


def test_a_trace_without_workspaces_stays_the_same() -> None:
    plain = trace(OPERATOR, "activations")
    assert with_double_workspaces(plain) is plain
    own = trace(OPERATOR)
    assert with_double_workspaces(own).nbytes.tolist() == [600 * MIB, 1400 * MIB, 100 * MIB]
    assert own.nbytes.tolist() == [600 * MIB, 700 * MIB, 100 * MIB]
