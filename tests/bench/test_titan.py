"""pytest tests/bench/test_titan.py: torchtitan's table, and the step that stands for its eager row."""

import pytest

from bench import titan
from bench.result_file import read_result
from memfit import toml

ROWS = toml.loads(titan.FIGURES.read_text())["row"]


def test_a_row_is_predicted_or_says_why_it_is_not_validated():
    for row in ROWS:
        assert ("script" in row) != bool(row.get("why")), row["how"]
        assert row["published"] > 0
        assert ("compile" in row["how"]) == ("compiled" in row.get("why", "")), row["how"]


def test_the_recorded_rows_are_those_of_the_table():
    recorded = read_result("titan")["rows"]
    assert [row["published"] for row in recorded] == [row["published"] for row in ROWS]
    assert [row["validated"] for row in recorded] == ["script" in row for row in ROWS]


@pytest.mark.slow
def test_the_step_shards_its_state_over_all_ranks():
    small = ("--size", "tiny", "--batch", "1", "--length", "64", "--words", "128")
    two, four = (titan.traced(ranks, small) for ranks in (2, 4))
    held = [sum(phase["categories"][name] for name in ("parameters", "optimizer")) for phase in (two, four)]
    assert held[1] < held[0]
    assert two["reserved_bytes"] >= two["allocated_bytes"]
