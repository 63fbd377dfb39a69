"""python -m pytest tests/jobs/test_builtin.py"""

import subprocess
import sys

from memfit.jobs import BUILTIN


def test_names_are_known_without_torch():
    code = "import sys, memfit.jobs; print('torch' in sys.modules, len(memfit.jobs.BUILTIN))"
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert said == ["False", str(len(BUILTIN))]
