"""Launches of Triton's kernels: python -m pytest tests/script/test_triton_launches.py"""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from memfit.errors import is_installed
from memfit.script.triton_writes import written_parameters
from tests.script.test_trace_script import SAMPLES, traced

MIB = 1 << 20
INSTALLED = is_installed("triton")
BOTH = [
    pytest.param((), marks=pytest.mark.skipif(not INSTALLED, reason="triton is not installed")),
    pytest.param(("--stub", "triton"), marks=pytest.mark.skipif(INSTALLED, reason="triton is installed")),
]
tl: Any = SimpleNamespace()


def add(x, y, out, n, BLOCK):  # noqa: N803
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    out += tl.load(x + at, mask=at < n).to(tl.int64)
    tl.store(out, tl.load(y + at))


def descend(pointer, starts):
    for _ in range(4):
        block = tl.make_block_ptr(pointer + tl.load(starts), (4,), (1,), (0,), (4,), (0,))
        pointer = block
    tl.store(block, 0)


def keep(place, value):
    tl.store(place, value)


helper = SimpleNamespace(fn=keep)


def by_helper(x, out, sums):
    at = tl.arange(0, 8)
    helper(out + at, value=tl.load(x + at))
    tl.atomic_max(sums, 1)


def by_descriptor(x, out):
    tl.make_tensor_descriptor(out, [4], [1], [4]).store([0], tl.make_tensor_descriptor(x, [4], [1], [4]).load([0]))


def by_unknown(x, out, elsewhere):
    elsewhere(out)
    return x


@pytest.mark.parametrize(
    ("kernel", "written"),
    [
        (add, {"out"}),
        (descend, {"pointer"}),
        (by_helper, {"out", "sums"}),
        (by_descriptor, {"out"}),
        (by_unknown, {"out"}),
        (lambda x: tl.store(x, 0), {"x"}),
        (eval("lambda x, y: None"), {"x", "y"}),
    ],
)
def test_a_kernel_writes_through_the_pointers_that_reach_a_store(kernel: Any, written: set[str]) -> None:
    assert written_parameters(kernel) == written


@pytest.mark.slow
@pytest.mark.parametrize("options", BOTH)
def test_a_script_s_kernels_are_left_out_and_its_autotuners_try_theirs(tmp_path: Path, options: Any) -> None:
    peaks = []
    for configs in ("1", "2"):
        script = str(SAMPLES / "triton_kernels.py")
        code, answer, said = traced(tmp_path, script, configs, options=("--device", "rtx4090", *options))
        assert code == 0, said
        lines = " ".join(answer["not_seen"])
        assert "Triton's kernels were not run" in lines
        assert ("autotuners" in lines) == (configs == "2")
        peaks.append(answer["phases"]["train"]["allocated_bytes"])
    buffer = 256 * MIB
    assert peaks[0] < buffer < peaks[1] <= peaks[0] + buffer
