"""Distributions of modules, looked up when they are asked for.

python -m pytest tests/test_distributions.py
"""

import importlib.metadata
import subprocess
import sys

import pytest

from memfit.distributions import distributions_when_asked
from memfit.loading import load_job

JOB = """
import importlib.metadata
import memfit

KNOWN = importlib.metadata.packages_distributions()


class Net(memfit.Job):
    def nets(self): ...
    def optimizers(self, nets): ...
    def batch(self, shape): ...
    def loss(self, nets, batch): ...
"""


@pytest.fixture
def calls(monkeypatch):
    made, look_up = [], importlib.metadata.packages_distributions

    def noted():
        made.append(look_up())
        return made[-1]

    monkeypatch.setattr(importlib.metadata, "packages_distributions", noted)
    return made


def test_a_job_that_only_holds_them_has_none_looked_up(tmp_path, calls):
    file = tmp_path / "holding.py"
    file.write_text(JOB)
    known = sys.modules[type(load_job(f"{file}:Net")).__module__].KNOWN
    assert calls == []
    assert known.get("torch") == ["torch"]
    assert known == importlib.metadata.packages_distributions()
    assert len(calls) == 2
    assert ("numpy" in known, "no_such_package" in known, len(known)) == (True, False, len(calls[0]))
    with pytest.raises(KeyError):
        known["no_such_package"]
    assert len(calls) == 2


def test_an_import_that_fails_puts_the_function_back():
    before = importlib.metadata.packages_distributions
    with pytest.raises(ZeroDivisionError), distributions_when_asked():
        1 / 0  # noqa: B018
    assert importlib.metadata.packages_distributions is before


def test_diffusers_asks_for_none():
    code = (
        "import importlib.metadata as m\n"
        "m.packages_distributions = lambda: print('looked up') or {}\n"
        "from memfit.loading import load_job\n"
        "load_job('musetalk/stage1')\n"
        "import sys\nprint('diffusers' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "True\n"
