"""A copy of a process that runs calls beside it: real forks.

python -m pytest tests/test_forked_process.py
"""

import io
import os
import random
import signal
import subprocess
import sys
import time
import warnings

import psutil
import pytest

from memfit.cli.progress import _LinesOnce
from memfit.forked_process import ForkedBranch, ForkedProcess, NoResultError


class Target:
    def __init__(self):
        self.numbers = []

    def add(self, number):
        self.numbers.append(number)
        return list(self.numbers)

    def fail(self):
        raise ValueError("the job's own")

    def unpicklable(self):
        return lambda: None

    def large(self):
        return bytes(8 << 20)

    def random(self):
        return random.random()

    def sleep(self):
        time.sleep(600)

    def speak(self):
        print("a copy speaks")
        print("a copy speaks", file=sys.stderr)
        os.write(2, b"a copy speaks\n")


@pytest.fixture
def target():
    return Target()


@pytest.fixture
def process(target):
    forked = ForkedProcess(target)
    yield forked
    forked.close()


def test_calls_run_in_order_in_the_copy_alone(process, target):
    first, second = process.call("add", 1), process.call("add", 2)
    assert second.result() == [1, 2]
    assert first.result() == [1]
    assert target.numbers == []


def test_a_call_that_raises_has_no_result_and_the_next_one_has(process):
    failed, next_one = process.call("fail"), process.call("add", 3)
    with pytest.raises(NoResultError):
        failed.result()
    assert next_one.result() == [3]


def test_what_cannot_be_pickled_has_no_result(process):
    for call in (process.call("unpicklable"), process.call("add", lambda: None)):
        with pytest.raises(NoResultError):
            call.result()
    assert process.call("add", 3).result() == [3]


def test_the_copy_does_not_wait_for_somebody_who_reads_large_results(process, target):
    calls = [process.call("large") for _ in range(4)]
    last = process.call("add", 1)
    assert last.result() == [1]
    assert [len(call.result()) for call in calls] == [8 << 20] * 4


def test_a_copy_that_was_killed_has_no_results(process):
    calls = [process.call("sleep"), process.call("add", 1)]
    os.kill(process.process_id, signal.SIGKILL)
    for call in (*calls, process.call("add", 2)):
        with pytest.raises(NoResultError):
            call.result()


def test_close_ends_a_copy_that_computes(process):
    call, copy = process.call("sleep"), psutil.Process(process.process_id)
    process.close()
    assert not copy.is_running()
    with pytest.raises(NoResultError):
        call.result()


def test_the_copy_draws_the_random_numbers_that_its_parent_would(process):
    state = random.getstate()
    drawn = process.call("random").result()
    random.setstate(state)
    assert drawn == random.random()


def test_the_copy_says_nothing(process, capfd):
    process.call("speak").result()
    assert capfd.readouterr() == ("", "")


def test_a_terminal_lock_that_a_lost_thread_holds_does_not_stop_the_copy():
    class Locked(io.StringIO):
        def write(self, text):
            raise AssertionError("this would wait for ever")

        flush = write

    class Speaks:
        stream = _LinesOnce(Locked())

        def speak(self):
            self.stream.write("a line\n")
            self.stream.flush()
            return "went on"

    forked = ForkedProcess(Speaks())
    try:
        assert forked.call("speak").result() == "went on"
    finally:
        forked.close()


def test_the_warning_of_python_3_12_about_threads_is_no_error(monkeypatch, target):
    fork = os.fork

    def as_in_3_12():
        message = (
            f"This process (pid={os.getpid()}) is multi-threaded, use of fork() may lead to deadlocks in the child."
        )
        warnings.warn(message, DeprecationWarning, stacklevel=2)
        return fork()

    monkeypatch.setattr(os, "fork", as_in_3_12)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        forked = ForkedProcess(target)
    assert forked.call("add", 1).result() == [1]
    forked.close()


def test_signals_that_stop_the_parent_are_no_longer_held_back_after_a_fork(process):
    assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) == set()


PARENT = """
import sys, time
from memfit.forked_process import ForkedProcess
class Target:
    def sleep(self):
        time.sleep(600)
forked = ForkedProcess(Target())
forked.call("sleep")
print(forked.process_id, flush=True)
time.sleep(600)
"""


def test_the_copy_ends_with_a_parent_that_was_killed():
    parent = subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    copy = psutil.Process(int(parent.stdout.readline()))
    parent.kill()
    parent.wait()
    parent.stdout.close()
    assert psutil.wait_procs([copy], timeout=20)[1] == []


@pytest.fixture
def branches():
    made = []
    yield made
    for branch in made:
        branch.close()


def branched(branches, value):
    """A branch whose copy gives a value; None: it ends without."""
    branch = ForkedBranch()
    if not branch.is_copy:
        branches.append(branch)
        return branch
    try:
        result = value()
        branch.give(result)
    finally:
        branch.end()


def test_a_branch_goes_on_when_it_is_told_to(tmp_path, branches):
    branch = branched(branches, lambda: (tmp_path / "went on").write_text("") or os.getpid())
    time.sleep(0.3)
    assert not list(tmp_path.iterdir())
    assert not branch.connection.poll()
    branch.begin()
    assert branch.result() not in (0, os.getpid())
    assert (branch.has_begun, branch.is_done) == (True, True)
    assert branch.result() == branch.result()
    assert list(tmp_path.iterdir())


def test_branches_give_what_they_are_and_draw_the_same_numbers(branches):
    random.seed(3)
    made = [branched(branches, random.random) for _ in range(2)]
    for branch in made:
        branch.begin()
    drawn = random.random()
    assert [branch.result() for branch in made] == [drawn, drawn]


@pytest.mark.parametrize("value", [lambda: 1 / 0, lambda: lambda: None, lambda: os._exit(3), lambda: sys.exit("no")])
def test_a_branch_that_fails_has_no_result(capfd, branches, value):
    branch = branched(branches, value)
    branch.begin()
    with pytest.raises(NoResultError):
        branch.result()
    assert capfd.readouterr() == ("", "")


def test_a_branch_ends_with_the_process_that_made_it():
    code = (
        "import os, time\nfrom memfit.forked_process import ForkedBranch\n"
        "branch = ForkedBranch()\nprint(branch._id, flush=True)\nos.kill(os.getpid(), 9)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == -signal.SIGKILL
    assert (
        psutil.wait_procs([psutil.Process(int(done.stdout))] if psutil.pid_exists(int(done.stdout)) else [], 10)[1]
        == []
    )


def test_a_closed_branch_has_ended(branches):
    branch = branched(branches, lambda: time.sleep(600))
    branch.begin()
    process = psutil.Process(branch._id)
    branch.close()
    branch.close()
    assert not process.is_running()
