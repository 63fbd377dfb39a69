"""python -m pytest tests/trace/test_saved_numbers.py"""

import subprocess
import sys
from pathlib import Path

SAMPLE = Path(__file__).parents[1] / "script" / "samples" / "products_in_place.py"


def test_a_product_in_place_on_a_view_is_traced(tmp_path: Path) -> None:
    """A trace on the virtual CPU waited for itself forever: in a process of its own, which can be stopped."""
    command = [sys.executable, "-m", "memfit", "trace", "--device", "cpu", "--memory", "8GiB", "--unsafe-writes", "--"]
    ran = subprocess.run([*command, "python", str(SAMPLE)], cwd=tmp_path, timeout=120, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "3 complete steps" in ran.stdout
