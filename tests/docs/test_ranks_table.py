"""Every cell of the table of engines in docs/ranks.md names a test file that is there, or says why there is none.

python -m pytest tests/docs/test_ranks_table.py
"""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
HEAD = "| | predicted |"


def rows():
    lines = iter((ROOT / "docs" / "ranks.md").read_text().splitlines())
    next(line for line in lines if line.startswith(HEAD))
    next(lines)
    for line in lines:
        if not line.startswith("|"):
            return
        yield [cell.strip() for cell in line.strip("|").split("|")]


def test_every_cell_is_a_test_or_a_reason():
    files = {path.name for path in (ROOT / "tests").rglob("test_*.py")}
    table = {name: cells for name, *cells in rows()}
    assert {"single", "ddp", "fsdp2", "dp_replicate x dp_shard"} <= table.keys()
    for name, cells in table.items():
        for cell in cells:
            named = re.findall(r"`(test_\w+\.py)`", cell)
            assert named or re.match(r"no: \S+ \S+", cell), (name, cell)
            assert set(named) <= files, (name, cell)
