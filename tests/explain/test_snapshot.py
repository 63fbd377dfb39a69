"""Memory snapshots: memfit's own, and ones of the form that torch writes.

pytest tests/explain/test_snapshot.py
"""

import pickle
from pathlib import Path
from typing import Any

import pytest

from memfit.errors import InputError
from memfit.explain.diagnosis import explain
from memfit.explain.evidence_reader import read_evidence
from memfit.show.snapshot import write_snapshot
from tests.explain.samples import MIB, leaking_snapshot
from tests.show.test_snapshot import trace_of


def read(tmp_path: Path, value: Any) -> Any:
    path = tmp_path / "snapshot.pickle"
    path.write_bytes(pickle.dumps(value))
    return read_evidence(str(path))


def test_live_blocks_by_line_and_category(tmp_path: Path) -> None:
    evidence = read(tmp_path, leaking_snapshot())
    assert [(holder.where, holder.category, holder.bytes, holder.blocks) for holder in evidence.alive] == [
        ("/home/u/train.py:30 in log", "unknown", 320 * MIB, 40),
        ("/home/u/train.py:33 in main", "optimizer", 64 * MIB, 1),
    ]
    state = evidence.state
    assert (state.allocated, state.unallocated) == (384 * MIB, 90 * MIB)
    assert (state.largest_hole, state.releasable) == (60 * MIB, 30 * MIB)
    assert state.allocated - state.requested == 41 * 100


def test_a_leak_with_the_line_that_holds_it(tmp_path: Path) -> None:
    explanation = explain(read(tmp_path, leaking_snapshot()))
    assert explanation.cause == "leak"
    assert explanation.evidence.growth.holder == "/home/u/train.py:30 in log"
    assert explanation.evidence.failures[0].requested == 512 * MIB
    assert explanation.evidence.failures[0].short == 412 * MIB


def test_steps_without_a_leak(tmp_path: Path) -> None:
    explanation = explain(read(tmp_path, leaking_snapshot(leaks=False)))
    assert explanation.evidence.growth is None
    assert explanation.cause == "too_large"


def test_one_step_that_only_grows_is_no_leak(tmp_path: Path) -> None:
    result = leaking_snapshot()
    result["device_traces"] = [[entry for entry in result["device_traces"][0] if entry["action"] != "free_completed"]]
    assert read(tmp_path, result).growth is None


def test_fragmentation(tmp_path: Path) -> None:
    result = leaking_snapshot(leaks=False)
    result["device_traces"][0][-1] |= {"size": 80 * MIB, "device_free": 10 * MIB}
    explanation = explain(read(tmp_path, result))
    assert explanation.cause == "fragmentation"
    change = explanation.changes[0]
    assert (change.name, change.helps, change.saves_bytes) == ("expandable segments", "perhaps", 90 * MIB)


def test_memfits_own_snapshot_has_its_categories(tmp_path: Path) -> None:
    path = tmp_path / "own.pickle"
    write_snapshot(path, trace_of([3 * MIB, 5 * MIB, 64 * MIB], [1, 2, 3]), capacity=30 * MIB)
    evidence = read_evidence(str(path))
    assert dict(evidence.categories) == {"parameters": 3 * MIB, "gradients": 5 * MIB}
    assert evidence.failures[0].requested == 64 * MIB


def test_a_snapshot_without_frames_says_so(tmp_path: Path) -> None:
    result = leaking_snapshot()
    for segment in result["segments"]:
        for block in segment["blocks"]:
            block["frames"] = []
    explanation = explain(read(tmp_path, result))
    assert any("_record_memory_history" in text for text in explanation.unknown)


@pytest.mark.parametrize("value", [{}, 3, "text", {"segments": 3}, {"segments": [{}]}, {"segments": [[1]]}, [[1]]])
def test_other_pickles_are_one_line(tmp_path: Path, value: Any) -> None:
    with pytest.raises(InputError):
        read(tmp_path, value)
