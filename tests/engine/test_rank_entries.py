"""Processes that join a process group end without Python's finalisation, in which gloo's threads may abort them.

The abort ("terminate called without an active exception") is a race of torch's that no test can force.
"""

import ast
from pathlib import Path

import pytest

ENTRIES = sorted((Path(__file__).parents[2] / "memfit").rglob("rank_entry.py"))


def test_there_are_three() -> None:
    assert [entry.parent.name for entry in ENTRIES] == ["audit", "launch", "verify"]


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: entry.parent.name)
def test_a_rank_ends_by_os_exit_alone(entry: Path) -> None:
    calls = [ast.unparse(node.func) for node in ast.walk(ast.parse(entry.read_text())) if isinstance(node, ast.Call)]
    assert "os._exit" in calls
    assert "sys.exit" not in calls
