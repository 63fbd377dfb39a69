"""Processes that a run starts: told to stop before they have begun, left by one that was killed, forked by a job.

python -m pytest tests/train/test_child_processes.py
"""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

ROOT = Path(__file__).parents[2]


def said(script):
    """(exit code, what a script said, its seconds)."""
    begin = time.monotonic()
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False, cwd=ROOT)
    return done.returncode, done.stdout + done.stderr, time.monotonic() - begin


def test_a_process_that_has_not_begun_is_ended_at_once():
    code, words, seconds = said("""
import os, signal, sys, threading
from memfit.train.launch.supervisor import Supervisor, run_child
supervisor = Supervisor()
with supervisor.guarding():
    threading.Timer(1, os.kill, (os.getpid(), signal.SIGTERM)).start()
    code = run_child([sys.executable, "-c", "import time; time.sleep(60)", "memfit.train.launch"], dict(os.environ))
print(code, supervisor.killed_early, supervisor.killed, supervisor.signalled is not None)
""")
    assert (code, words) == (0, "-9 True False True\n")
    assert seconds < 30


def test_a_signal_right_before_the_end_is_noted():
    code, words, _ = said("""
import os, signal
from memfit.train.launch.supervisor import Supervisor
noted = []
for _ in range(5):
    supervisor = Supervisor()
    with supervisor.guarding():
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])
        os.kill(os.getpid(), signal.SIGTERM)
    noted.append(supervisor.signalled is not None)
print(noted)
""")
    assert (code, words) == (0, f"{[True] * 5}\n")


def test_what_a_killed_process_leaves_behind_is_ended():
    code, words, _ = said("""
import subprocess, psutil
from memfit.child_process import no_orphans
kept = subprocess.Popen(["sleep", "60"])
with no_orphans(0.2):
    left = int(subprocess.run(["sh", "-c", "sleep 60 >&2 & echo $!"], stdout=subprocess.PIPE).stdout)
    assert psutil.pid_exists(left)
print(psutil.pid_exists(left), kept.poll())
kept.kill()
""")
    assert (code, words) == (0, "False None\n")


def test_processes_that_a_job_forks_have_no_handler_of_the_run():
    code, words, _ = said("""
import os, signal
from memfit.train.launch.stop_signals import ends_at_once
ends_at_once(lambda: print("stopped", flush=True))
reader, writer = os.pipe()
os.set_blocking(writer, False)
signal.set_wakeup_fd(writer)
worker = os.fork()
if worker == 0:
    os.kill(os.getpid(), signal.SIGINT)
    os.kill(os.getpid(), signal.SIGTERM)
    os._exit(0)
print(os.waitstatus_to_exitcode(os.waitpid(worker, 0)[1]), flush=True)
os.set_blocking(reader, False)
try:
    print(os.read(reader, 8))
except BlockingIOError:
    print("not woken", flush=True)
os.kill(os.getpid(), signal.SIGTERM)
""")
    assert (code, words) == (5, "-15\nnot woken\nstopped\n")


def test_a_run_that_stops_does_not_wait_for_a_pool_of_the_jobs():
    code, words, seconds = said("""
import threading
from concurrent.futures import ThreadPoolExecutor
from memfit.train.launch.rank_entry import leave
pool = ThreadPoolExecutor(1)
pool.submit(print, "fetched").result()
threading.Thread(target=lambda: print("written"), name="memfit-saver").start()
threading.Thread(target=threading.Event().wait).start()
leave(5)
""")
    assert (code, words) == (5, "fetched\nwritten\n")
    assert seconds < 60


def test_a_run_that_is_done_waits_for_the_jobs_threads_for_a_while_and_runs_its_exit_handlers():
    code, words, seconds = said("""
import atexit, threading, time
from memfit.train.launch import rank_entry
rank_entry.LEAVES_SECONDS = 2.0
atexit.register(print, "exit handler")
threading.Thread(target=lambda: (time.sleep(0.2), print("thread"))).start()
rank_entry.leave(0)
""")
    assert (code, words) == (0, "thread\nexit handler\n")
    assert seconds < 60


def test_a_run_that_is_done_ends_though_a_thread_of_the_job_does_not():
    code, words, seconds = said("""
import threading
from memfit.train.launch import rank_entry
rank_entry.LEAVES_SECONDS = 0.5
threading.Thread(target=threading.Event().wait, name="reader").start()
rank_entry.leave(0)
""")
    assert code == 0
    line = "memfit: the training is done, and the job's threads (reader) have not ended 0.5 s later: they are ended now"
    assert words == line + "\n"
    assert seconds < 60


def test_a_run_that_is_done_has_memory_for_its_end_whatever_its_limit_was():
    code, words, _ = said("""
import atexit, resource
from memfit.train.launch import memory_limit, rank_entry
atexit.register(lambda: print(len(bytearray(64 << 20)) >> 20))
resource.setrlimit(resource.RLIMIT_DATA, (memory_limit.data_bytes(), resource.getrlimit(resource.RLIMIT_DATA)[1]))
rank_entry.leave(0)
""")
    assert (code, words) == (0, "64\n")


@pytest.mark.parametrize(("before", "code", "ended"), [("", 5, "stopped\n"), ("trap '' HUP; ", 0, "goes on\n")])
def test_a_terminal_that_hangs_up_stops_a_run_but_not_under_nohup(before, code, ended):
    script = (
        "import os, signal;"
        "from memfit.train.launch.stop_signals import ends_at_once;"
        "ends_at_once(lambda: print('stopped', flush=True));"
        "os.kill(os.getpid(), signal.SIGHUP); print('goes on')"
    )
    command = ["bash", "-c", f'{before}exec {sys.executable} -c "{script}"']
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, cwd=ROOT,
        preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_DFL),  # the suite itself may run under nohup
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (code, ended), done.stderr


@pytest.mark.parametrize(("kept", "words"), [("", "memfit: one\n"), ("keep_stderr()", "memfit: one\nmemfit: two\n")])
def test_a_job_that_closes_standard_error_silences_no_line(kept, words):
    code, heard, _ = said(f"""
import os, sys
from memfit.train.launch.outcome import keep_stderr, say
{kept}
say("one")
os.close(2)
sys.stderr.close()
say("two")
""")
    assert (code, heard) == (0, words)


@pytest.mark.parametrize(("line", "said"), [("Done: here", "Done: here\n"), ("", "")])
def test_a_signal_to_a_run_that_is_done_ends_it_with_its_code_and_its_line(line, said):
    script = (
        "import os, signal;"
        "from memfit.train.launch.stop_signals import end_with;"
        f"end_with(0, {line!r});"
        "os.kill(os.getpid(), signal.SIGTERM); print('goes on')"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False, cwd=ROOT)
    assert (done.returncode, done.stdout) == (0, said), done.stderr


def test_a_launch_of_ranks_that_is_killed_leaves_no_temporary_files(tmp_path):
    script = """
from pathlib import Path
from memfit.train.launch.outcome import spare_folder
from memfit.train.launch.torchrun import torchrun
with spare_folder():
    torchrun(2, "timeit", ["-n1", "-r1", "import time; time.sleep(60)"], Path())
"""
    environment = {**os.environ, "TMPDIR": str(tmp_path), "PYTHONPATH": str(ROOT)}
    with subprocess.Popen([sys.executable, "-c", script], cwd=tmp_path, env=environment) as process:
        until, ranks = time.monotonic() + 60, []
        while len(ranks) < 2 and time.monotonic() < until:
            time.sleep(0.05)
            ranks = [child for child in psutil.Process(process.pid).children() if "timeit" in child.cmdline()]
        process.kill()
    for rank in ranks:
        rank.kill()
    assert len(ranks) == 2
    assert list(tmp_path.iterdir()) == []
