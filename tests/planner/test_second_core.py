"""A second core for the search: the plan is that of one core, to the byte. Real forks, from processes of their own,
since the first backward of a process forbids them.

python -m pytest tests/planner/test_second_core.py
"""

import json
import os
import pickle
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from memfit import forked_process
from memfit.device.hardware import process_limits
from memfit.forked_process import ForkedCall
from memfit.job import Shape
from memfit.planner.search import second_core
from memfit.planner.search.second_core import SecondCore

ROOT = Path(__file__).resolve().parents[2]
JOBS = "tests/planner/second_core_jobs.py"
TIGHT = ["--global-batch", "10", "--micro-batch", "4", "--device", "a100-40gb", "--memory", "600MiB"]


def ask(cores, job, options=TIGHT):
    command = [sys.executable, "-m", "tests.planner.second_core_plan", str(cores), f"{JOBS}:{job}", *options]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    return *json.loads(done.stdout), done.stderr


@pytest.mark.slow
def test_a_plan_of_two_cores_is_that_of_one():
    code, alone, counts, _ = ask(1, "Small")
    assert (code, counts["forked"], counts["begun"], counts["full steps"]) == (0, 0, 0, 0)
    code, plan, counts, _ = ask(2, "Small")
    assert (code, counts["forked"], counts["full steps"]) == (0, 3, 1)
    assert counts["begun"] == counts["taken"] == counts["equal"] >= 2
    assert plan == alone
    assert plan["checkpointing"]


@pytest.mark.slow
@pytest.mark.parametrize(("job", "forks"), [("Importing", 2), ("Caching", 3)])
def test_a_full_step_that_depends_on_earlier_ones_is_traced_where_there_was_none(job, forks):
    roomy = ["--micro-batch", "4", "--device", "a100-40gb"]
    code, plan, counts, _ = ask(2, job, ["--global-batch", "8", *roomy])
    assert (code, counts["forked"], counts["full steps"]) == (0, forks, 1)
    assert (plan["checkpointing"], plan["micro_batches"]) == ({}, [4, 4])
    command = [sys.executable, "-m", "memfit", "predict", f"{JOBS}:{job}", "--accumulate", "2", *roomy, "--json"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    predicted = json.loads(done.stdout)["phases"]["train"]["process_bytes"]
    assert plan["phases"]["train"]["process_bytes"] == predicted
    _, later, _, _ = ask(1, job, ["--global-batch", "8", *roomy])
    is_known = job == "Caching"  # what the module keeps is counted wherever it is used
    assert (later["phases"]["train"]["process_bytes"] == predicted) == is_known


@pytest.mark.slow
@pytest.mark.parametrize("job", ["Drawn", "Hoarding"])
def test_no_trace_is_taken_that_was_made_in_another_state(job):
    code, plan, counts, _ = ask(2, job)
    assert code == 0
    assert counts["begun"] >= 2
    assert (counts["taken"], counts["full steps"]) == (0, job == "Hoarding")
    assert plan == ask(1, job)[1]


@pytest.mark.slow
def test_a_copy_that_fails_leaves_all_traces_to_the_search():
    code, plan, counts, _ = ask(2, "Parted")
    assert (code, counts["forked"], counts["taken"], counts["full steps"]) == (0, 3, 0, 0)
    assert plan == ask(1, "Parted")[1]


@pytest.mark.slow
def test_what_the_job_raises_in_the_copy_is_said_once():
    code, plan, counts, err = ask(2, "Refusing")
    assert (code, plan, counts["forked"], counts["full steps"]) == (2, None, 3, 0)
    assert err.count("\n") == 1
    assert "no validation of this job" in err


@pytest.mark.slow
def test_an_interrupt_leaves_no_copy_and_no_plan(tmp_path):
    command = [
        sys.executable,
        "-m",
        "memfit",
        "plan",
        "latentsync/stage1",
        "--global-batch",
        "6",
        "--device",
        "rtx3090",
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        [*command, "--out", str(tmp_path / "plan.toml")], cwd=ROOT, env=environment, text=True,
        stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, start_new_session=True,
    )  # fmt: skip
    copies = []
    while not copies and process.poll() is None:
        time.sleep(0.05)
        copies = [child for child in psutil.Process(process.pid).children() if child.name().startswith("python")]
    time.sleep(1)
    os.killpg(process.pid, signal.SIGINT)
    assert (process.communicate(timeout=60)[1], process.returncode) == ("memfit: stopped\n", 5)
    assert copies
    assert psutil.wait_procs(copies, timeout=20)[1] == []
    assert list(tmp_path.iterdir()) == []


class Copied:
    """Stands in for a job; nothing of it is called."""

    def open(self):
        pass


@pytest.mark.parametrize(
    ("allowed", "cores", "available", "forkable", "forks"),
    [
        (True, 2, 1 << 60, True, True),
        (False, 2, 1 << 60, True, False),
        (True, 1, 1 << 60, True, False),
        (True, 2, 1 << 20, True, False),
        (True, 2, 1 << 60, False, False),
    ],
)
def test_a_copy_needs_leave_a_core_memory_and_no_threads(monkeypatch, allowed, cores, available, forkable, forks):
    monkeypatch.setattr(forked_process, "available_cores", lambda: cores)
    monkeypatch.setattr(process_limits, "available_bytes", lambda: available)
    monkeypatch.setattr(forked_process, "is_forkable", lambda: forkable)
    if not allowed:
        with second_core.open_second_core(Copied(), Copied()) as core:
            assert core is None
        return
    with second_core.second_core_allowed():
        with second_core.open_second_core(Copied(), Copied()) as core:
            assert (core is not None) == forks
        if forks:
            with second_core.open_second_core(Copied(), Copied()) as core:
                assert core is None  # autograd's threads do not survive a second fork


def test_no_trace_has_to_share_a_core_with_a_full_step():
    class Calls:
        """Stands in for both copies' processes; notes what they are asked for."""

        def __init__(self):
            self.methods = []

        def call(self, method, *arguments):
            self.methods.append(method)
            call = ForkedCall(lambda call: None)
            call.finish(None)
            return call

    calls = Calls()
    core, best = SecondCore(calls, calls), object()
    core.set_up()
    core.set_up()
    core.begin_trace((Shape(items=1), frozenset(), True, None))
    core.begin_full_step(best, None)
    core.begin_trace((Shape(items=2), frozenset(), True, None))
    assert calls.methods == ["open", "open", "trace", "full_step"]
    assert core.full_step(best) is None
    core.begin_trace((Shape(items=2), frozenset(), True, None))
    assert calls.methods == ["open", "open", "trace", "full_step", "trace"]


@pytest.mark.parametrize("fails", [False, True])
def test_a_copy_that_cannot_trace_what_was_traced_before_leaves_it_to_the_first_one(fails):
    class Copy:
        """Stands in for a copy's process; notes what it is asked for."""

        def __init__(self, fails=False):
            self.methods, self.fails = [], fails

        def call(self, method, *arguments):
            self.methods.append(method)
            call = ForkedCall(lambda call: None)
            call.finish(None if self.fails else pickle.dumps(None))
            return call

    first, later = Copy(), Copy(fails)
    core = SecondCore(Copy(), first, lambda: later)
    core.set_up()
    core.begin_full_step(object(), None)
    assert (first.methods, later.methods) == ((["full_step"], ["open"]) if fails else ([], ["open", "full_step"]))


def test_a_machine_without_another_process_is_searched_alone(monkeypatch):
    def refuse(copy):
        raise BlockingIOError("Resource temporarily unavailable")

    monkeypatch.setattr(forked_process, "available_cores", lambda: 2)
    monkeypatch.setattr(second_core, "ForkedProcess", refuse)
    with second_core.second_core_allowed(), second_core.open_second_core(Copied(), Copied()) as core:
        assert core is None
