"""What others wrote reaches the terminal as text: no escape sequence, no line of its own.

python -m pytest tests/test_printable.py
"""

import contextlib
import io
import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest
from rich.live import Live

from memfit.engine.collectives import is_memory_failure
from memfit.engine.lost_rank import is_lost_rank
from memfit.errors import InputError, describe
from memfit.printable import one_line, printable
from memfit.show.console import make_console

ROOT = Path(__file__).parents[1]
HOSTILE = "\x1b]0;owned\x07\x1b[2Jx\x9b31m\u202egnp.exe\r\x08"


def test_control_characters_are_written_out():
    assert printable("a\tb\nc é 漢") == "a\tb\nc é 漢"
    assert printable(HOSTILE) == "\\x1b]0;owned\\x07\\x1b[2Jx\\x9b31m\\u202egnp.exe\\r\\x08"
    assert one_line("a\nb\x85c\u2028d") == "a b c d"
    assert printable("\ud800").encode()


def test_messages_of_errors():
    assert "\x1b" not in str(InputError(HOSTILE, "is wrong", "write another"))
    assert "\x1b" not in describe(ValueError(HOSTILE))


def test_an_exception_that_cannot_say_what_it_is():
    class SilentError(RuntimeError):
        def __str__(self):
            raise ValueError("planted")

    assert describe(SilentError()) == "SilentError"
    assert not is_memory_failure(SilentError())
    assert not is_lost_rank(SilentError())


@pytest.mark.parametrize("markup", [True, False])
def test_consoles_write_them_out_and_keep_their_own_styles(markup):
    file = io.StringIO()
    console = make_console(file=file, force_terminal=True, width=200)
    console.print(f"[bold]name[/] {HOSTILE}", markup=markup, soft_wrap=True)
    text = file.getvalue()
    assert "\\x1b]0;owned" in text
    assert "\x1b]" not in text
    assert ("\x1b[1mname" in text) is markup


def test_lines_beside_a_live_view():
    file = io.StringIO()
    console = make_console(file=file, force_terminal=True, width=200)
    with Live("still", console=console, auto_refresh=False):
        console.print(HOSTILE, markup=False, soft_wrap=True)
    assert "\x1b]" not in file.getvalue()
    assert "\\x1b]0;owned" in file.getvalue()


def test_a_name_that_is_no_markup_is_printed_as_it_is():
    file = io.StringIO()
    make_console(file=file, width=200).print("Written to a[/b].toml")
    assert file.getvalue() == "Written to a[/b].toml\n"


PRINTS = """
import sys
from memfit.printable import keep_terminal_safe
keep_terminal_safe()
print("\\x1b]0;owned\\x07out", end="\\r\\n")
sys.stderr.writelines(["\\x1b[2Jerror\\n"])
print(f"{sys.stdout.isatty()=}")
"""


def on_a_terminal(command, **options):
    """What a command says to a terminal."""
    parent, child = pty.openpty()
    said = b""
    with subprocess.Popen(command, stdout=child, stderr=child, cwd=ROOT, **options) as process:
        os.close(child)
        with contextlib.suppress(OSError):  # the terminal is closed when the last process that holds it has ended
            while part := os.read(parent, 1 << 16):
                said += part
    os.close(parent)
    assert process.returncode == 0, said
    return said.decode()


def test_what_a_process_prints_to_a_terminal_is_written_out():
    said = on_a_terminal([sys.executable, "-c", PRINTS])
    assert "\x1b" not in said
    assert "\x07" not in said
    assert "\\x1b]0;owned\\x07out\r" in said
    assert "\\x1b[2Jerror" in said
    assert "isatty()=True" in said


HOSTILE_JOB = """
import torch
from torch import nn
from memfit.job import Job

class Prints(Job):
    def nets(self):
        print("\\x1b]0;owned\\x07nets")
        return {"net": nn.Linear(16, 4)}

    def optimizers(self, nets):
        return {"net": torch.optim.SGD(nets["net"].parameters(), 0.1)}

    def batch(self, shape):
        return torch.zeros(shape.items, 16)

    def loss(self, nets, batch):
        return nets["net"](batch).sum(), len(batch)
"""


@pytest.mark.slow
@pytest.mark.parametrize("options", ["predict JOB --device rtx4090 --micro-batch 4", "verify JOB --world-sizes 1,2"])
def test_what_a_job_prints_within_a_verb_is_written_out(tmp_path, options):
    job = tmp_path / "prints.py"
    job.write_text(HOSTILE_JOB)
    words = options.replace("JOB", f"{job}:Prints").split()
    said = on_a_terminal([sys.executable, "-m", "memfit", *words], env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert "\x1b]0;" not in said
    assert "owned" in said
