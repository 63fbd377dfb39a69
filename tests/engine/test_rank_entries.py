"""Processes that join a process group end without Python's finalisation, in which gloo's threads may abort them.

The abort ("terminate called without an active exception") is a race of torch's that no test can force.
"""

import ast
import gc
from pathlib import Path

import pytest

from memfit.train.launch import rank_entry, worker
from memfit.train.run_options import RunOptions

ENTRIES = sorted((Path(__file__).parents[2] / "memfit").rglob("rank_entry.py"))


def test_there_are_three() -> None:
    assert [entry.parent.name for entry in ENTRIES] == ["audit", "launch", "verify"]


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: entry.parent.name)
def test_a_rank_ends_by_os_exit_alone(entry: Path) -> None:
    calls = [ast.unparse(node.func) for node in ast.walk(ast.parse(entry.read_text())) if isinstance(node, ast.Call)]
    assert "os._exit" in calls
    assert "sys.exit" not in calls


def test_later_collections_pass_over_what_a_rank_imports(monkeypatch: pytest.MonkeyPatch) -> None:
    frozen: list[int] = []
    monkeypatch.setattr(worker, "main", lambda options: frozen.append(gc.get_freeze_count()) or 0)
    before, imported = gc.get_freeze_count(), [[] for _ in range(1000)]
    assert rank_entry.main(RunOptions(folder="")) == 0
    assert frozen[0] - before >= len(imported)
    assert gc.isenabled()
