"""Every how-to of docs/how-to does what it says.

pytest tests/docs/test_how_to.py [-m slow]
"""

from pathlib import Path

import pytest

from tests.docs.how_to import ROOT, edit, follow, run_console

PAGES = sorted((ROOT / "docs" / "how-to").glob("*.md"))
LONG = ("add-a-job", "add-an-engine")


@pytest.mark.parametrize(
    "page",
    [pytest.param(page, id=page.stem, marks=[pytest.mark.slow] if page.stem in LONG else []) for page in PAGES],
)
def test_a_how_to_does_what_it_says(page: Path, tmp_path: Path) -> None:
    assert follow(page, tmp_path)


def test_there_are_four() -> None:
    assert [page.stem for page in PAGES] == ["add-a-card", "add-a-job", "add-a-memory-option", "add-an-engine"]


def test_a_patch_that_does_not_apply_is_a_failure(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("one\ntwo\n")
    edit(tmp_path / "a.py", "patch", " one\n-two\n+three\n")
    assert (tmp_path / "a.py").read_text() == "one\nthree\n"
    with pytest.raises(AssertionError, match="0 times"):
        edit(tmp_path / "a.py", "patch", "-two\n+four\n")


def test_output_that_is_not_printed_is_a_failure(tmp_path: Path) -> None:
    (tmp_path / "memfit").symlink_to(ROOT / "memfit")
    with pytest.raises(AssertionError, match="prints no"):
        run_console("$ memfit --help\nno such words\n", tmp_path)
