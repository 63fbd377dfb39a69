"""Standard output whose reader leaves, that is full, or whose encoding is narrow."""

import os
import resource
import signal
import subprocess
import sys
from pathlib import Path

import click
import pytest

from memfit.cli.output import complain
from memfit.cli.progress import progress
from tests.cli.asking import RIGHT, ROOT, Run

DEVICES = [sys.executable, "-m", "memfit", "devices"]
FULL = Path("/dev/full")


def test_a_verb_whose_reader_has_left_ends_quietly():
    script = f'{" ".join(DEVICES)} | true; codes=("${{PIPESTATUS[@]}}"); exit ${{codes[0]}}'
    answer = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=False, cwd=ROOT)
    assert (answer.returncode, answer.stderr) == (0, "")


def test_what_is_read_is_complete():
    complete = subprocess.run(DEVICES, capture_output=True, text=True, check=True, cwd=ROOT)
    script = f"{' '.join(DEVICES)} | head -n 2"
    answer = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=True, cwd=ROOT)
    assert answer.stdout == "".join(complete.stdout.splitlines(keepends=True)[:2])


@pytest.mark.skipif(not FULL.exists(), reason="no device that is always full")
@pytest.mark.parametrize("more", [[], ["--json"]])
def test_a_full_disk_is_one_line(more):
    with FULL.open("w") as full:
        answer = subprocess.run(DEVICES + more, stdout=full, stderr=subprocess.PIPE, text=True, check=False, cwd=ROOT)
    assert answer.returncode == 2
    assert answer.stderr.startswith("memfit: standard output: cannot be written: No space left on device; ")
    assert answer.stderr.count("\n") == 1


@pytest.mark.parametrize("closed", [">&-", "<&-", "2>&-", "<&- >&- 2>&-"])
def test_a_verb_whose_streams_are_closed_does_its_work(closed: str, plan_file: Path, tmp_path: Path) -> None:
    """A service may start a verb so; its output is discarded, and none of it goes into a file that the verb writes."""
    write = [sys.executable, "-m", "memfit", "export", str(plan_file), "--to", "torchrun", "--out"]
    undisturbed = subprocess.run([*write, tmp_path / "a.sh"], capture_output=True, text=True, check=True, cwd=ROOT)
    script = f"{' '.join(write)} {tmp_path / 'b.sh'} {closed}"
    answer = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=False, cwd=ROOT)
    assert (answer.returncode, answer.stderr) == (0, "")
    assert (tmp_path / "b.sh").read_text() == (tmp_path / "a.sh").read_text()
    is_read = " >&-" not in f" {closed}"
    assert answer.stdout == (undisturbed.stdout.replace("a.sh", "b.sh") if is_read else "")


def test_a_mistake_that_nobody_can_read_still_has_its_exit_code() -> None:
    script = f"{sys.executable} -m memfit predict no/job 2>&-; {sys.executable} -m memfit explain - <&-"
    answer = subprocess.run(["bash", "-c", f"{script}; exit $?"], capture_output=True, text=True, check=False, cwd=ROOT)
    assert answer.returncode == 2
    assert answer.stderr.startswith("memfit: standard input: it is empty; ")
    assert answer.stderr.count("\n") == 1


@pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
def test_a_narrow_encoding_gets_plain_characters(encoding):
    environment = {**os.environ, "PYTHONIOENCODING": encoding, "PYTHONUTF8": "0", "OMP_NUM_THREADS": "1"}
    ask = [sys.executable, "-m", "memfit", "predict", "tests/cli/wrong_jobs.py:Right", "--device", "cpu"]
    answer = subprocess.run(ask, capture_output=True, check=False, cwd=ROOT, env=environment)
    assert (answer.returncode, answer.stderr) == (0, b"")
    assert b"#" in answer.stdout


def test_a_complaint_that_nobody_can_read_is_no_fault(monkeypatch):
    class Full:
        def write(self, text):
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(sys, "stderr", Full())
    complain("something")


def test_a_line_that_is_said_while_progress_is_shown_reaches_standard_error(capfd):
    with progress("writing the report"):
        click.echo("memfit: no report was written", err=True)
    assert capfd.readouterr().err == "memfit: no report was written\n"


@pytest.mark.parametrize(("columns", "breaks"), [("", False), ("60", True)])
def test_a_pipe_gets_whole_sentences(run: Run, monkeypatch: pytest.MonkeyPatch, columns: str, breaks: bool) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    _, out, _ = run("predict", RIGHT, "--device", "rtx4090")
    lines = out.splitlines()
    assert (lines[0].startswith("Fits on") and lines[0].endswith(").")) is not breaks
    assert any(line.endswith("usable") and line.startswith(RIGHT) for line in lines) is not breaks


IMPORTS = "import memfit.cli"
NO_MEMORY = "memfit: this command: the memory that this process may take ran out; free some"
FAILS = """
import importlib.abc, sys
class Full(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name == "memfit.cli":
            raise MemoryError
sys.meta_path.insert(0, Full())
from memfit.__main__ import main
main()
"""


def under(kibibytes: int, *words: str) -> subprocess.CompletedProcess:
    """Runs Python in a process that may take so much memory (RLIMIT_DATA)."""
    limit = kibibytes << 10
    return subprocess.run(
        [sys.executable, *words], capture_output=True, text=True, check=False, cwd=ROOT, timeout=120,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_DATA, (limit, limit)),
    )  # fmt: skip


def test_memory_that_runs_out_in_memfit_itself_is_one_line():
    starts = next(size for size in range(4 << 10, 64 << 10, 1 << 10) if not under(size, "-c", IMPORTS).returncode)
    answers = [under(size, "-m", "memfit", "devices") for size in range(starts, starts + (6 << 10), 128)]
    failed = [answer.stderr for answer in answers if answer.returncode and not python_gave_up(answer)]
    assert failed
    assert not [said for said in failed if not said.startswith(NO_MEMORY) or said.count("\n") != 1]


LIBRARY_FAILS = f"""
import resource, sys
import memfit.cli
class Unmapped:
    def find_spec(self, name, path, target=None):
        if name == "memfit.cli.devices":
            limit = {24 << 20}
            resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
            raise ImportError("cannot import name 'sha512' from 'hashlib'")
sys.meta_path.insert(0, Unmapped())
sys.argv[1:] = ["devices"]
from memfit.__main__ import main
main()
"""


def test_a_library_that_cannot_be_mapped_for_want_of_memory_is_the_same_line():
    """Python then says that a name is not in a module."""
    command = [sys.executable, "-c", "kept = bytearray(16 << 20)\n" + LIBRARY_FAILS]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.returncode == 2
    assert done.stderr.startswith(NO_MEMORY)
    assert done.stderr.count("\n") == 1


def python_gave_up(answer: subprocess.CompletedProcess) -> bool:
    """Within a few KiB of the least that a verb needs, Python 3.11 aborts before any handler runs."""
    return answer.returncode == -signal.SIGABRT and "Fatal Python error" in answer.stderr


def test_memory_that_runs_out_while_a_verb_is_imported_is_the_same_line():
    """An import that fails for it is made to: where it fails by itself, Python may not start either."""
    done = subprocess.run([sys.executable, "-c", FAILS], capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.returncode == 2
    assert done.stderr.startswith(NO_MEMORY)
    assert done.stderr.count("\n") == 1
