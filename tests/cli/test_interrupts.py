"""Ctrl-C while a verb begins or works: one line, exit code 5, no traceback of this process or of its children."""

import os
import re
import signal
import subprocess
import sys
import time

import pytest

from tests.cli.asking import RIGHT, ROOT

VERBS = {
    "predict": ["predict", RIGHT, "--device", "rtx4090"],
    "trace": ["trace", "--device", "rtx4090", "--", "python", "tests/script/samples/plain_loop.py"],
    "verify": ["verify", RIGHT, "--world-sizes", "1"],
}
DEFINES_A_CLASS = """
import os, signal, memfit.cli, memfit.__main__
def interrupted():
    source = "import os, signal; os.kill(os.getpid(), signal.SIGINT)"
    exec(source)
memfit.cli.root.main = lambda **options: interrupted()
memfit.__main__.main()
"""


def interrupt(command: list[str], seconds: float) -> tuple[int, str]:
    """What a command's exit code and standard error are where the terminal's group of processes gets SIGINT."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    process = subprocess.Popen(
        command, cwd=ROOT, env=environment, text=True, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
        start_new_session=True,
    )  # fmt: skip
    time.sleep(seconds)
    os.killpg(process.pid, signal.SIGINT)
    err = process.communicate(timeout=30)[1]
    return process.returncode, err


def test_an_interrupt_that_passes_through_exec_ends_with_the_exit_code() -> None:
    code, err = interrupt([sys.executable, "-c", DEFINES_A_CLASS], 3)
    assert (code, err) == (5, "memfit: stopped\n")


WHILE_IMPORTING = """
import os, signal, sys
class Interrupts:
    def find_spec(self, name, *rest):
        if name == "{module}":
            os.kill(os.getpid(), signal.SIGINT)
sys.meta_path.insert(0, Interrupts())
from memfit.__main__ import main
main()
"""
WHILE_ARGUMENTS_ARE_READ = """
import os, signal, memfit.cli, memfit.__main__
memfit.cli.root.parse_args = lambda *rest: os.kill(os.getpid(), signal.SIGINT)
memfit.__main__.main()
"""


@pytest.mark.parametrize(
    "source",
    [*(WHILE_IMPORTING.format(module=f"memfit.{module}") for module in ("interruption", "no_memory", "cli")),
     WHILE_ARGUMENTS_ARE_READ],
)  # fmt: skip
def test_an_interrupt_before_the_verb_begins_is_one_line(source: str) -> None:
    done = subprocess.run([sys.executable, "-c", source], cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (5, "memfit: stopped\n")


SWALLOWED = """
import os, signal, memfit.cli, memfit.__main__
def interrupted(**options):
    try:
        os.kill(os.getpid(), signal.{name})
    except BaseException:
        raise ImportError("cannot load module more than once per process") from None
memfit.cli.root.main = interrupted
memfit.__main__.main()
"""


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM"])
def test_an_interrupt_that_an_import_turns_into_its_own_error_is_one_line(name: str) -> None:
    source = SWALLOWED.format(name=name)
    done = subprocess.run([sys.executable, "-c", source], cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (5, "memfit: stopped\n")


@pytest.mark.slow
@pytest.mark.parametrize("seconds", [0.3, 1.0, 2.5])
@pytest.mark.parametrize("verb", VERBS)
def test_one_line(verb: str, seconds: float) -> None:
    code, err = interrupt([sys.executable, "-m", "memfit", *VERBS[verb]], seconds)
    printed = "[0-9]+ loss [0-9.]+ accuracy [0-9.]+\n" if verb == "trace" else ""  # by the script that is traced
    assert code == 0 or (code == 5 and re.fullmatch(f"({printed})*memfit: stopped\n", err))
    assert "Traceback" not in err


WHILE_AN_OBJECT_ENDS = """
import os, signal, time
import memfit.cli, memfit.__main__

class Ending:
    def __del__(self):
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.01)  # the handler runs here

def work(**options):
    Ending()
    time.sleep(20)

memfit.cli.root.main = work
memfit.__main__.main()
"""


def test_an_interrupt_while_an_object_is_finalized_is_not_lost() -> None:
    begin = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-c", WHILE_AN_OBJECT_ENDS], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (5, "memfit: stopped\n")
    assert time.monotonic() - begin < 8
