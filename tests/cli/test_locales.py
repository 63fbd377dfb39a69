"""Files are UTF-8, whatever the locale says.

python -m pytest tests/cli/test_locales.py
"""

import os
import subprocess
import sys
from pathlib import Path

from tests.cli.asking import ROOT

ASCII = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
"""An environment in which Python reads text as ASCII."""


def asked(code: str, *arguments: str | Path) -> str:
    """What Python prints in such a locale."""
    command = [sys.executable, "-c", code, *map(str, arguments)]
    environment = {**os.environ, **ASCII, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT, env=environment)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_a_plan_is_read(plan: str, tmp_path: Path) -> None:
    file = tmp_path / "plan.toml"
    file.write_text(plan.replace('arithmetic = "', 'arithmetic = "größe '), "utf-8")
    code = "import sys; from memfit.plan import read_plan; print(ascii(read_plan(sys.argv[1]).arithmetic))"
    assert asked(code, file).startswith(r"'gr\xf6\xdfe ")


def test_the_cards_of_a_file_are_read(tmp_path: Path) -> None:
    file = tmp_path / "devices.toml"
    file.write_text('[mine]\nname = "größe"\ncompute_capability = [8, 6]\nmemory_bytes = 12622168064\n', "utf-8")
    code = (
        "import sys; from pathlib import Path; from memfit.device.hardware.catalogue import read_cards\n"
        "print(ascii(read_cards(Path(sys.argv[1]))['mine'].name))"
    )
    assert asked(code, file) == r"'gr\xf6\xdfe'"
