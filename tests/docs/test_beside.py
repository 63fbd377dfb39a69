"""Every Python block of docs/beside.md runs as it stands.

pytest tests/docs/test_beside.py
"""

import re
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "beside.md"
BLOCKS = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("number", range(len(BLOCKS)))
def test_a_block_runs(number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    exec(compile(BLOCKS[number], f"{PAGE.name} block {number}", "exec"), {"__name__": "__main__"})
