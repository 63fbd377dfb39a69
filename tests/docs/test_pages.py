"""What README.md and docs/ name is there: files, links, commands, benchmarks; and figures come from results.

pytest tests/docs/test_pages.py
"""

import json
import re
from pathlib import Path

import pytest

from bench.result_file import HEADER, RESULTS, ROOT
from docs.blocks import BLOCK, pages
from memfit.cli import VERBS

PAGES = [*pages(), ROOT / "CONTRIBUTING.md"]
FILE = re.compile(r"`((?:memfit|tests|bench|docs|examples|scripts)/[\w./-]*[\w/])`")
LINK = re.compile(r"\]\((?!https?:|#)([\w./-]+)(?:#[\w-]+)?\)")


def named(page: Path) -> str:
    return str(page.relative_to(ROOT))


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_every_file_that_a_page_names_or_links_is_there(page: Path) -> None:
    text = page.read_text()
    created = re.findall(r"<!-- create: (\S+) -->", text)
    quoted = [path for path in FILE.findall(text) if not (ROOT / path).exists() and path not in created]
    prose = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
    linked = [path for path in LINK.findall(prose) if not (page.parent / path).resolve().exists()]
    assert [quoted, linked] == [[], []]


def test_architecture_names_a_file_of_every_folder() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text()
    folders = {path.parent.name for path in (ROOT / "memfit").glob("*/__init__.py")}
    missing = [folder for folder in sorted(folders) if f"`memfit/{folder}/" not in text]
    assert missing == []
    assert len(FILE.findall(text)) > 40


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_every_command_that_a_page_names_is_there(page: Path) -> None:
    text = page.read_text()
    verbs = set(re.findall(r"`memfit (\w+)", text)) | set(re.findall(r"^(?:    |\$ )memfit (\w+)", text, re.MULTILINE))
    assert verbs <= set(VERBS)
    benches = set(re.findall(r"python -m (bench\.\w+)", text))
    assert [name for name in benches if not (ROOT / f"{name.replace('.', '/')}.py").exists()] == []


@pytest.mark.parametrize("path", sorted(RESULTS.glob("*")), ids=lambda path: path.name)
def test_a_result_names_the_command_that_wrote_it_whole(path: Path) -> None:
    answer = json.loads(path.read_text())
    assert path.stem in answer["command"]
    if path.stem not in OWN_HEADER:
        assert list(answer)[: len(HEADER)] == list(HEADER)
        script = SCRIPTS.get(path.stem, path.stem)
        assert re.fullmatch(rf"python -m bench\.{script}\b.*", answer["command"])
        assert not answer["commit"].endswith("-dirty")


SCRIPTS = {"timm_amp": "accuracy", "timm_amp_again": "accuracy", "xmem": "accuracy", "recipes": "accuracy"}
"""Results whose script is called otherwise: it writes a file for each source, and the source is in the command."""

OWN_HEADER = ("versions",)
"""Results of many environments, whose files say by themselves what each was made with."""


FIGURE = re.compile(r"\d+\.\d+ ?(?:%|GiB|MiB|GB|s\b|ms\b|x\b)")
QUOTED = {
    "docs/published.md": "figures that others published, and what follows from them by arithmetic",
}
"""Pages whose figures outside of blocks have another source than bench/results, and which."""


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_a_measured_figure_stands_in_a_block(page: Path) -> None:
    """A decimal figure with a unit comes from a command or a result, which a block makes; or its source is named."""
    if named(page) not in QUOTED:
        text = re.sub(r"```console\n.*?```", "", BLOCK.sub("", page.read_text()), flags=re.DOTALL)
        assert FIGURE.findall(text) == []
