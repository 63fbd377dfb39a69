"""A thread that finds memory for its stack alone must not hold up the one that starts it, nor end the process later.

python -m pytest tests/train/test_threads.py
"""

import os
import resource
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from memfit.apply.train_state import build
from memfit.train.checkpoint.checkpoints import Checkpoints, read_checkpoint
from memfit.train.checkpoint.saver import Saver
from memfit.train.launch import memory_limit
from memfit.train.launch.memory_limit import ENVIRONMENT
from testing.killed_job import Killed
from tests.train.test_reduced_limits import PLAN

ROOT = Path(__file__).parents[2]

FILLED = """
import faulthandler, mmap, resource, sys, threading
from memfit.train.launch import memory_limit

faulthandler.dump_traceback_later(20, exit=True)
room = mmap.mmap(-1, int(sys.argv[1]), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
ran = threading.Event()
thread = threading.Thread(target=ran.set)
hard = resource.getrlimit(resource.RLIMIT_DATA)[1]
kept = [None] * 400_000
resource.setrlimit(resource.RLIMIT_DATA, (memory_limit.data_bytes() + (2 << 20), hard))
count = 0
for size in (480, 400, 320, 240, 160, 120, 80, 48, 24, 8, 1):
    try:
        while True:
            kept[count] = bytes(size + 1)
            count += 1
    except MemoryError:
        pass
room.close()
try:
    memory_limit.start_thread(thread)
except RuntimeError:
    started = False
else:
    started = True
    thread.join()
kept.clear()
memory_limit.lift()
print(started, ran.is_set())
"""
"""Fills the memory of a process up to a little room, and starts a thread in it."""


@pytest.mark.parametrize("room_kib", [*range(544, 641, 8), 16384])
def test_a_thread_starts_or_is_refused_whatever_room_is_left(room_kib):
    command = [sys.executable, "-c", FILLED, str(room_kib << 10)]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=60, env={**os.environ, **ENVIRONMENT}, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == (["True", "True"] if room_kib > 4096 else ["False", "False"])
    assert not done.stderr


LATE = """
import threading
import torch
from memfit.train.launch import memory_limit
from tests.train.full_memory import fill

value, go = torch.ones(()), threading.Event()

def use_torch():
    go.wait()
    try:
        print(float(value))
    except MemoryError:
        print("no memory")

thread = threading.Thread(target=use_torch)
memory_limit.start_thread(thread)
kept = fill((16384, 4096, 1024, 480, 400))
go.set()
thread.join()
"""
"""Fills the memory of a process while a thread waits, which then uses torch for the first time."""


def test_a_thread_that_uses_torch_where_memory_is_full_does_not_end_the_process():
    done = subprocess.run(
        [sys.executable, "-c", LATE], capture_output=True, text=True, timeout=60, cwd=ROOT,
        env={**os.environ, **ENVIRONMENT},
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout in ("1.0\n", "no memory\n")


def test_what_no_thread_can_be_made_for_is_done_at_once_by_a_simulated_start(tmp_path, monkeypatch):
    """Memory that another thread takes between the look at it and the start cannot be had on purpose."""

    def fails(thread):
        raise MemoryError

    train_state = build(Killed(), "cpu")
    writer = Saver(checkpoints=Checkpoints(tmp_path), plan=PLAN, asynchronous=True)
    monkeypatch.setattr(memory_limit, "start_thread", fails)
    monkeypatch.setattr("memfit.train.checkpoint.tensor_file.start_thread", fails)
    writer.warm(train_state)
    writer.save(train_state, 3)
    assert writer.finish()
    assert read_checkpoint(writer.checkpoints.folder(3)).next_window == 3


def test_the_limit_is_lifted_until_the_last_of_several_threads_is_done():
    hard = resource.getrlimit(resource.RLIMIT_DATA)[1]
    try:
        allowed = memory_limit.limit(8 << 30) + (8 << 30)
        inside, outside = threading.Event(), threading.Event()

        def other():
            with memory_limit.lifted():
                inside.set()
                outside.wait(60)

        with memory_limit.lifted():
            thread = threading.Thread(target=other)
            thread.start()
            inside.wait(60)
            assert resource.getrlimit(resource.RLIMIT_DATA)[0] == hard
        assert resource.getrlimit(resource.RLIMIT_DATA)[0] == hard
        outside.set()
        thread.join()
        assert resource.getrlimit(resource.RLIMIT_DATA)[0] == allowed
        with memory_limit.lifted():
            memory_limit.lift()
        assert resource.getrlimit(resource.RLIMIT_DATA)[0] == hard
    finally:
        memory_limit.lift()


def test_a_limit_that_is_not_of_memfit_stays():
    script = (
        "import resource; from memfit.train.launch import memory_limit\n"
        "resource.setrlimit(resource.RLIMIT_DATA, (8 << 30, resource.RLIM_INFINITY))\n"
        "with memory_limit.lifted(): pass\n"
        "print(resource.getrlimit(resource.RLIMIT_DATA)[0])"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert int(done.stdout) == 8 << 30
