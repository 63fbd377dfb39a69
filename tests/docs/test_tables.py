"""Tables of results whose files this checkout need not hold: each is made from what its benchmark writes.

pytest tests/docs/test_tables.py
"""

import json
from pathlib import Path
from typing import Any

import pytest

from bench import result_file
from docs import tables

FIGURES: dict[str, dict[str, Any]] = {
    "loop": {"rounds": [
        {name: {"milliseconds": took, "added_milliseconds": added} for name, took, added in rows}
        for rows in ([("by hand", 1.9, 0.0), ("memfit", 2.4, 0.5)], [("by hand", 2.0, 0.0), ("memfit", 2.6, 0.57)])
    ], "microseconds_of_parts": {"the step, as by hand": 700.2, "reading": 12.4, "lines": 30.3}},
    "kills": {"writing": {
        "synchronous": {"kills": 100, "while_saving": 85, "finished": 8, "passed_over": 0, "repeated": 86},
    }},
    "faults": {
        "rows": [
            {"job": "a", "failure": "step", "points": 3, "done": 3, "same_ids": 3, "same_weights": 3, "torn": 0},
            {"job": "b", "failure": "step", "points": 4, "done": 4, "same_ids": 4, "same_weights": 4, "torn": 0},
        ],
        "total": {"points": 7, "done": 7, "same_ids": 7, "same_weights": 7, "torn": 0},
    },
    "saving": {
        "bytes": 391_000_000, "tensors": 498, "rounds": 16,
        "ways": {"raw": {
            "seconds": 0.5, "over_raw_by_rounds": 1.0, "over_raw_least": 1.0, "over_raw_most": 1.0, "core_seconds": 0.4,
        }},
        "asynchronous_holds_up": {
            "seconds_per_gigabyte": 0.2, "most_seconds_per_gigabyte": 0.8, "buffer_bytes": 391_000_000,
        },
    },
    "latentsync_story": {
        "upstream_predicted_bytes": {"train": 59 << 20, "validate": 126 << 20}, "budget_bytes": 113 << 20,
        "upstream_failed_in": "validate", "plan": "4 = 4 x 1 on 1 device", "validated_after_windows": [1, 3, 5],
        "measured_process_bytes": 90 << 20,
    },
}  # fmt: skip


@pytest.fixture
def results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, figures in FIGURES.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(figures))
    monkeypatch.setattr(result_file, "RESULTS", tmp_path)


@pytest.mark.usefixtures("results")
def test_a_result_becomes_a_table() -> None:
    assert "| memfit | 2.40 to 2.60 | 0.50 to 0.57 |" in tables.loop()
    assert "| lines | 30 |\n| reading | 12 |\n| **together** | **43** |" in tables.loop_parts()
    assert "| synchronous | 100 | 85 | 8 | 0 | 86 |" in tables.kills()
    assert "| step | 7 | 7 | 7 | 7 | 0 |" in tables.faults()
    assert "| raw | 0.50 | 1.00 | 1.00 to 1.00 | 0.40 |" in tables.saving()
    assert "391 MB in 498 tensors, 16 rounds" in tables.saving_text()
    assert "runs out of memory in validate" in tables.story()


def test_a_result_is_written_with_its_command_and_read_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["/x/bench/kills.py", "--kills", "3", "--json", "k.json", "--seed", "a b"])
    result_file.write_result(tmp_path / "kills.json", {"writing": {}})
    answer = json.loads((tmp_path / "kills.json").read_text())
    assert tuple(answer) == (*result_file.HEADER, "writing")
    assert answer["command"] == "python -m bench.kills --kills 3 --seed 'a b'"
    assert answer["versions"]["torch"]
    assert result_file.target(None, complete=False) is None
    assert result_file.target(None) == result_file.RESULTS / "kills.json"
