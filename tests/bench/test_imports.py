"""bench and testing stand below the tests, and testing below bench.

pytest tests/bench/test_imports.py
"""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(("folder", "above"), [("bench", {"tests"}), ("testing", {"tests", "bench"})])
def test_nothing_imports_what_stands_above_it(folder: str, above: set[str]) -> None:
    imports = {
        (str(file.relative_to(ROOT)), name)
        for file in (ROOT / folder).rglob("*.py")
        for node in ast.walk(ast.parse(file.read_text()))
        for name in imported(node)
    }
    assert ("bench/attack.py", "testing.attacker") in imports or folder == "testing"
    assert [(file, name) for file, name in sorted(imports) if name.split(".")[0] in above] == []


def imported(node: ast.AST) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    return [node.module or ""] if isinstance(node, ast.ImportFrom) else []
