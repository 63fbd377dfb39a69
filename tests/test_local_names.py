"""Local names say what they hold: ``found`` and ``told`` say only that something was found or told.

python -m pytest tests/test_local_names.py
"""

import ast
from pathlib import Path

ROOT = Path(__file__).parents[1]
EMPTY = {"found", "told"}
"""In the package also ``one``, which elsewhere may be a number of something beside ``three``."""


def stored_names(source: str) -> set[tuple[str, int]]:
    """The names that a source assigns, and those of its parameters, with their lines."""
    names = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add((node.id, node.lineno))
        elif isinstance(node, ast.arg):
            names.add((node.arg, node.lineno))
    return names


def test_names_that_are_stored_are_seen() -> None:
    source = "def f(one, *told):\n    for found in told:\n        a = found.b\n    return [c for c in a]\n"
    assert stored_names(source) == {("one", 1), ("told", 1), ("found", 2), ("a", 3), ("c", 4)}


def test_no_local_name_is_empty() -> None:
    files = [
        path
        for name in ("memfit", "bench", "docs", "scripts", "testing", "examples", "tests")
        for path in (ROOT / name).rglob("*.py")
        if not any(part.startswith(".") for part in path.parts[len(ROOT.parts) :])
    ]
    assert len(files) > 500
    empty = [
        f"{path.relative_to(ROOT)}:{line}: {name}"
        for path in files
        for name, line in sorted(stored_names(path.read_text()))
        if name in EMPTY or (name == "one" and path.is_relative_to(ROOT / "memfit"))
    ]
    assert empty == []
