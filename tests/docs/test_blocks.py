"""Every marked block of README.md and docs/ is what is made now. Where it is not: python docs/blocks.py

pytest tests/docs/test_blocks.py
"""

import re
from pathlib import Path

import pytest

from docs.blocks import blocks, fresh, pages, without_times

BLOCKS = [(page, block) for page in pages() for block in blocks(page.read_text())]


SLOW = frozenset({"run: memfit cards examples/llama_lora.py:Llama8B --no-largest"})
"""Blocks that take longer than CI should wait: run with -m slow."""


@pytest.mark.parametrize(
    ("page", "block"),
    [
        pytest.param(page, block, id=f"{page.name} {block}", marks=[pytest.mark.slow] * (block in SLOW))
        for page, block in BLOCKS
    ],
)
def test_a_block_is_what_is_made_now(page: Path, block: str) -> None:
    made = fresh(block)
    if "memfit trace" in block and "--unsafe-writes" in made:
        pytest.skip("this system has no namespaces for the sandbox of memfit trace")
    assert without_times(made) == without_times(blocks(page.read_text())[block])


def test_readme_shows_a_script_a_prediction_a_mistake_a_job_and_the_measured_accuracy() -> None:
    shown = [block for page, block in BLOCKS if page.name == "README.md"]
    assert "run: memfit predict examples/llama_lora.py:Llama8B --device rtx4090 --micro-batch 2048" in shown
    assert any(re.match(r"run \d+: memfit trace .*-- python examples/scripts/", block) for block in shown)
    assert "run: memfit predict f5_tts/bas --device rtx4090" in shown
    assert any(block.startswith("file: examples/") for block in shown)
    assert "text: accuracy summary" in shown


def test_each_slow_block_is_still_there() -> None:
    assert {block for _, block in BLOCKS} >= SLOW


def test_every_comment_that_opens_a_block_is_closed() -> None:
    for page in pages():
        text = page.read_text()
        opened = re.findall(r"^<!-- (?:run(?: \d+)?|file|table|text): ", text, re.MULTILINE)
        assert len(opened) == len(blocks(text)) == text.count("<!-- end -->"), page


def test_durations_are_masked() -> None:
    assert without_times("about 5.93 s a window, 12 s") == "about … s a window, … s"
