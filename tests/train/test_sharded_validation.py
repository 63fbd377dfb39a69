"""A validation under FSDP2 leaves the weights as the window before it did: in parts, and ready to be put back.

python -m pytest tests/train/test_sharded_validation.py
"""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_windows_and_validations_in_turn_change_no_weight_by_themselves():
    command = [sys.executable, "-m", "tests.train.sharded_validation_rank"]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert ended.returncode == 0, ended.stderr
