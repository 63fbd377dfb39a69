"""The table of docs/beside.md says what each framework can promise; each cell is shown by a test that is there.

pytest tests/docs/test_promises.py
"""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "beside.md").read_text()
SHOWN = re.compile(r"`(\w+\.py): (\w+)`")


def tables() -> tuple[dict[str, dict[str, str]], dict[str, dict[str, str]]]:
    """The cells of both tables, what is promised and what shows it, by framework and promise."""
    heads = [match.start() for match in re.finditer(r"^\| \| measure ", PAGE, re.MULTILINE)]
    read = []
    for head in heads:
        first, _, *rest = PAGE[head : PAGE.index("\n\n", head)].splitlines()
        promises = cells(first)[1:]
        read.append({cells(line)[0]: dict(zip(promises, cells(line)[1:], strict=True)) for line in rest})
    promised, shown = read
    return promised, shown


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip("|").split("|")]


PROMISED, SHOWN_BY = tables()


def test_every_promise_of_every_framework_is_in_both_tables() -> None:
    assert list(PROMISED) == ["plain loop", "Transformers", "Lightning", "Accelerate", "DeepSpeed"]
    assert {name: set(row) for name, row in PROMISED.items()} == {name: set(row) for name, row in SHOWN_BY.items()}


@pytest.mark.parametrize("framework", PROMISED)
def test_each_cell_names_a_test_or_says_why_not(framework: str) -> None:
    for promise, cell in PROMISED[framework].items():
        for number in re.findall(r"\((\d)\)", cell):
            assert f"\n{number}. " in PAGE, (promise, number)
        if cell.startswith("no"):
            assert re.search(r"\(\d\)", cell), f"{promise} does not say why"
        else:
            assert SHOWN.fullmatch(SHOWN_BY[framework][promise]), promise


@pytest.mark.parametrize(("file", "name"), sorted(set(SHOWN.findall(PAGE))))
def test_a_test_that_the_page_names_is_there(file: str, name: str) -> None:
    texts = [path.read_text() for path in (ROOT / "tests").rglob(file)]
    assert any(f"def {name}(" in text for text in texts)
