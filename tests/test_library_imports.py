"""pytest tests/test_library_imports.py: modules whose run is put off are the same once they are asked for something."""

import subprocess
import sys

import pytest

SPARED = "from memfit.library_imports import spare_imports; spare_imports(); spare_imports()\n"
HAS_RUN = "'scipy.stats._stats_py' in sys.modules"


def _run(code: str) -> str:
    ended = subprocess.run([sys.executable, "-c", f"import sys\n{SPARED}{code}"], capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout.strip()


@pytest.mark.parametrize(
    "looks",
    ["", "import inspect; inspect.getmodule(inspect)", "hasattr(scipy.stats, '__wrapped__')", "scipy.stats.__path__"],
)
def test_a_module_that_is_imported_and_looked_at_does_not_run(looks: str):
    assert _run(f"import scipy.stats\n{looks}\nprint({HAS_RUN})") == "False"


@pytest.mark.parametrize(
    "use",
    [
        "from scipy.stats import norm",
        "import scipy.stats as stats; norm = stats.norm",
        "import scipy.stats.distributions; norm = scipy.stats.distributions.norm",
        "from scipy.stats import *; norm",
        "import scipy.stats; dir(scipy.stats); norm = getattr(scipy.stats, 'norm')",
        "import scipy.stats, importlib; norm = importlib.reload(scipy.stats).norm",
    ],
)
def test_whatever_is_asked_of_it_is_there(use: str):
    assert _run(f"{use}\nprint(float(norm.cdf(0.0)), {HAS_RUN})") == "0.5 True"


def test_what_it_lacks_is_an_error_by_name():
    assert "no attribute 'nothing'" in _run(
        "import scipy.stats\ntry: scipy.stats.nothing\nexcept AttributeError as e: print(e)"
    )


def test_threads_that_ask_at_once_get_the_same():
    code = """
import threading, scipy.stats
names, start = [], threading.Barrier(8)
def ask():
    start.wait()
    names.append(scipy.stats.norm.name)
threads = [threading.Thread(target=ask) for _ in range(8)]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
print(names == ["norm"] * 8)
"""
    assert _run(code) == "True"


def test_transformers_reads_the_files_of_its_models_once():
    pytest.importorskip("transformers")
    code = """
import transformers.models
from transformers.utils import import_utils
info = import_utils.create_import_structure_from_path.cache_info()
print(info.hits > 100, info.misses == info.currsize)
"""
    assert _run(code) == "True True"
