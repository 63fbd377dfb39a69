"""What is traced after an answer, by a process of its own: later questions are answered from it, and it ends by itself.

python -m pytest tests/cli/test_background_traces.py
"""

import json
import os
import resource
import signal
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path
from unittest.mock import Mock

import pytest

from memfit.cli import background_traces, cards, predict
from memfit.cli import max as max_verb
from memfit.cli.background_traces import SECONDS, AheadRequest, processor_seconds, trace_in_background
from memfit.forked_process import fork
from memfit.job import Shape
from tests.cli.asking import ROOT

CHOICES = {
    "micro_batches": 1,
    "engine": "single",
    "world": 1,
    "mesh": None,
    "rank": None,
    "plan": None,
    "checkpointing": {},
}
JOB = """
import os, time, torch, memfit

class Own(memfit.Job):
    def nets(self):
        with open("loaded", "a") as file:
            file.write(f"{os.getpid()} ")
        return {"net": torch.nn.Linear(8, 8)}
    def optimizers(self, nets):
        return {"net": torch.optim.SGD(nets["net"].parameters())}
    def batch(self, shape):
        with open("sizes", "a") as file:
            file.write(f"{os.getpid()} {shape.items}\\n")
        if shape.items == 2 and os.path.exists("slow"):
            open("begun", "w").close()
            while os.path.exists("slow"):
                pass
        return torch.zeros(shape.items, 8)
    def dataset(self):
        return os.listdir("samples")
    def loss(self, nets, batch):
        return nets["net"](batch).sum(), len(batch)
"""


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "job.py").write_text(JOB)
    (tmp_path / "samples").mkdir()
    (tmp_path / "samples" / "one").touch()
    return tmp_path


def environment(folder: Path, **more: str) -> dict[str, str]:
    kept = {
        "MEMFIT_KEEP_TRACES": "1",
        "MEMFIT_TRACE_AHEAD": "0",
        "XDG_CACHE_HOME": str(folder / "cache"),
        "OMP_NUM_THREADS": "1",
    }
    return {**os.environ, "PYTHONPATH": str(ROOT), **kept, **more}


def asked(folder: Path, *words: str, **more: str) -> str:
    """What a question with captured output answers."""
    command = [sys.executable, "-m", "memfit", *words]
    done = subprocess.run(
        command, cwd=folder, env=environment(folder, **more), capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def request_of(job: str) -> str:
    request = AheadRequest(
        job=job, pairs=(), precision=None, shape=Shape(items=1), device="rtx4090", choices=CHOICES, code=job
    )
    return json.dumps(asdict(request))


def started(folder: Path, job: str = "job.py:Own") -> subprocess.Popen[bytes]:
    """The process of the background with the priority of others: this machine may be busy."""
    command = [sys.executable, "-c", "import sys; from memfit.cli.background_traces import main; main(sys.argv[1:])"]
    return subprocess.Popen([*command, request_of(job)], cwd=folder, env=environment(folder))


def wait_until_slow(folder: Path) -> None:
    """Waits until the job stands in a batch."""
    begin = time.monotonic()
    while not (folder / "begun").exists():
        assert time.monotonic() < begin + 120
        time.sleep(0.05)


def sizes_of(folder: Path, process: subprocess.Popen[bytes]) -> set[str]:
    """The sizes that a process has traced."""
    lines = (folder / "sizes").read_text().split("\n")
    return {line.split()[1] for line in lines if line.startswith(f"{process.pid} ")}


def answers(text: str) -> dict:
    """An answer in JSON, without the time that it took."""
    values = json.loads(text)
    values.pop("seconds", None)
    return values


@pytest.mark.slow
def test_later_questions_of_a_script_are_answered_without_another_trace(folder):
    asked(folder, "predict", "job.py:Own", "--device", "rtx4090", "--json")
    assert started(folder).wait(timeout=300) == 0
    loaded = (folder / "loaded").read_text()
    questions = (
        ("predict", "job.py:Own", "--device", "rtx4090"),
        ("predict", "job.py:Own", "--device", "rtx4090", "--micro-batch", "7"),
        ("predict", "job.py:Own", "--device", "rtx4090", "--micro-batch", "50000"),
        ("predict", "job.py:Own", "--device", "t4"),
        ("predict", "job.py:Own", "--device", "h100"),
        ("max", "job.py:Own", "--device", "rtx4090"),
        ("max", "job.py:Own", "--device", "t4"),
        ("cards", "job.py:Own"),
    )
    kept = [answers(asked(folder, *question, "--json")) for question in questions]
    assert (folder / "loaded").read_text() == loaded  # the job was not built again
    assert kept[-1]["epoch_units"] == 1
    fresh = [answers(asked(folder, *question, "--json", "--fresh")) for question in questions]
    assert kept == fresh


@pytest.mark.slow
def test_one_process_traces_at_a_time_and_leaves_nothing_half_written_when_its_time_is_spent(folder):
    (folder / "slow").touch()
    process = started(folder)
    wait_until_slow(folder)
    assert resource.prlimit(process.pid, resource.RLIMIT_CPU)[0] == SECONDS
    assert started(folder).wait(timeout=120) == 0  # it finds the other one, and ends
    assert set((folder / "loaded").read_text().split()) == {str(process.pid)}
    process.send_signal(signal.SIGXCPU)  # as the kernel does where its time is spent
    assert process.wait(timeout=120) == 1
    traces = [path.name for path in (folder / "cache" / "memfit" / "traces").iterdir()]
    assert any(name.endswith(".npz") for name in traces)
    assert not any(name.startswith(".") for name in traces)


@pytest.mark.slow
def test_it_leaves_a_job_for_the_next_that_is_asked_of(folder):
    (folder / "slow").touch()
    (folder / "other.py").write_text(JOB)
    process = started(folder)
    wait_until_slow(folder)
    begun = sizes_of(folder, process)
    other, lock = started(folder, "other.py:Own"), folder / "cache" / "memfit" / "traces" / "tracing"
    while lock.read_text() != "other.py:Own":
        time.sleep(0.05)
    (folder / "slow").unlink()
    assert [process.wait(timeout=120), other.wait(timeout=120)] == [0, 0]
    assert sizes_of(folder, process) == begun
    assert len(sizes_of(folder, other)) > len(begun)


@pytest.mark.slow
def test_it_ends_and_keeps_nothing_when_the_code_is_changed(folder):
    (folder / "slow").touch()
    process = started(folder)
    wait_until_slow(folder)
    begun = sizes_of(folder, process)
    (folder / "job.py").write_text(JOB.replace("Linear(8, 8)", "Linear(8, 1024)"))
    (folder / "slow").unlink()
    assert process.wait(timeout=120) == 0
    assert sizes_of(folder, process) == begun
    question = ("predict", "job.py:Own", "--device", "rtx4090", "--micro-batch", "2", "--json")
    assert answers(asked(folder, *question)) == answers(asked(folder, *question, "--fresh"))


@pytest.fixture
def begun(monkeypatch):
    """The commands that would have been started."""
    commands = []
    monkeypatch.setattr(subprocess, "Popen", lambda command, **options: commands.append((command, options)) or Mock())
    return commands


QUESTION = AheadRequest(job="own", pairs=(), precision=None, shape=Shape(items=1), device="rtx4090", choices=CHOICES)


def test_it_starts_in_a_session_of_its_own_without_the_streams_of_the_answer(begun):
    trace_in_background(QUESTION, {"HOME": "/nowhere"})
    ((command, options),) = begun
    assert command[:3] == [sys.executable, "-m", background_traces.__name__]
    assert json.loads(command[3])["job"] == "own"
    assert options["env"] == {"HOME": "/nowhere"}
    assert options["start_new_session"]
    assert {options[name] for name in ("stdin", "stdout", "stderr")} == {subprocess.DEVNULL}


def test_the_environment_leaves_it_out(begun):
    trace_in_background(QUESTION, {"MEMFIT_TRACE_AHEAD": "0"})
    assert begun == []


def test_nothing_begins_where_memory_is_short(begun, monkeypatch):
    monkeypatch.setattr("memfit.device.hardware.process_limits.available_bytes", lambda: 1 << 20)
    trace_in_background(QUESTION, {})
    assert begun == []


def test_stepping_aside_takes_the_lowest_priority():
    script = "import os; from memfit.cli.background_traces import step_aside; step_aside(); print(os.nice(0))"
    command, own = [sys.executable, "-c", script], Path("/proc/self/autogroup")
    before = own.read_text() if own.exists() else ""
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT, start_new_session=True)
    assert done.stdout == "19\n"
    assert before == (own.read_text() if own.exists() else "")  # these tests keep their priority


@pytest.mark.parametrize("more", [("--ci", "--budget", "20GiB"), ("--fresh",), ("--accumulate", "2"), ()])
def test_predict_starts_it_after_a_trace_that_is_kept(monkeypatch, tmp_path, more):
    requests = []
    monkeypatch.setattr(background_traces, "trace_in_background", lambda request, environment: requests.append(request))
    monkeypatch.setenv("MEMFIT_KEEP_TRACES", "1")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    command = ["testing/linear_layer.py:LinearLayer", "--device", "rtx4090", *more]
    for _ in range(2):  # the second time, nothing is traced
        predict.command.main(args=command, standalone_mode=False)
    if {"--ci", "--fresh"} & set(more):
        assert requests == []
    else:
        (request,) = requests
        assert request.choices["micro_batches"] == (2 if more else 1)


@pytest.mark.parametrize(("verb", "options"), [(max_verb, ["--device", "rtx4090"]), (cards, ["--no-largest"])])
def test_so_do_max_and_cards(monkeypatch, tmp_path, verb, options):
    requests = []
    monkeypatch.setattr(background_traces, "trace_in_background", lambda request, environment: requests.append(request))
    monkeypatch.setenv("MEMFIT_KEEP_TRACES", "1")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    command = ["testing/linear_layer.py:LinearLayer", *options]
    for _ in range(2):  # the second time, nothing is traced
        verb.command.main(args=command, standalone_mode=False)
    (request,) = requests
    assert (request.shape, request.choices) == (Shape(items=1), {"checkpointing": {}})
    assert json.loads(json.dumps(asdict(request)))
    verb.command.main(args=[*command, "--fresh"], standalone_mode=False)
    assert len(requests) == 1


def test_the_processor_s_time_of_copies_and_of_their_copies_counts():
    ended, end = os.pipe()
    before, child = processor_seconds(), fork()
    if child == 0:
        grandchild = fork()
        if grandchild == 0:
            while time.process_time() < 0.5:
                pass
            os._exit(0)
        os.waitpid(grandchild, 0)
        os.write(end, b"1")
        time.sleep(60)
        os._exit(0)
    try:
        os.read(ended, 1)
        assert processor_seconds() - before >= 0.4
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        os.close(ended)
        os.close(end)
