"""README shows what its commands print now. Where it does not: python docs/readme.py

pytest tests/test_readme.py
"""

import importlib.util
import re
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[1]
TEXT = (ROOT / "README.md").read_text()


def _readme() -> ModuleType:
    spec = importlib.util.spec_from_file_location("readme", ROOT / "docs" / "readme.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


readme = _readme()
BLOCKS = readme.blocks(TEXT)


@pytest.mark.parametrize("block", BLOCKS)
def test_a_block_is_what_is_printed_now(block: str) -> None:
    assert readme.without_times(readme.fresh(block)) == readme.without_times(BLOCKS[block])


def test_readme_shows_a_prediction_a_plan_a_mistake_and_a_job() -> None:
    verbs = [block.split()[2] for block in BLOCKS if block.startswith("run: ")]
    assert {"predict", "plan"} <= set(verbs)
    assert "run: memfit predict f5_tts/base --device rtx4090 --micro-batch 3200" in BLOCKS
    assert any(block.startswith("file: examples/") for block in BLOCKS)


def test_every_file_that_readme_links_or_quotes_is_there() -> None:
    quoted = re.findall(r"`((?:tests|examples|docs|bench)/[^`]+)`", TEXT)
    paths = {*quoted, *re.findall(r"\]\(([\w/.-]+)\)", TEXT)}
    assert {"CHANGELOG.md", "examples/lora.py", "tests/trace/test_cpu_truth.py"} <= paths
    assert [path for path in sorted(paths) if not (ROOT / path).exists()] == []


def test_every_verb_that_readme_names_is_there() -> None:
    from memfit.cli import VERBS

    named = set(re.findall(r"`memfit (\w+)", TEXT)) | set(re.findall(r"^\$? ?memfit (\w+)", TEXT, re.MULTILINE))
    assert named
    assert named <= set(VERBS)
