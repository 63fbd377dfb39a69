"""A copy of the process that answers, made when it has loaded a job and before it traces: it stays after the answer.

It traces for the next questions, in a process of its own (``memfit.cli.background_traces``), and listens at a socket in
the user's cache while that one runs: what a next question needs and is not kept, a copy of it traces at once, without
imports and without building the job again, which it has set up for that while the first question was answered. Copies
are made before the first backward, since autograd's threads do not survive a fork.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import sys
import time
import warnings
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import NoReturn

from memfit.cli.counted_epoch import ASKED, count_epoch
from memfit.cli.question_socket import QuestionSocket, show_socket
from memfit.device.hardware.catalogue import find_device
from memfit.device.hardware.process_limits import available_cores, has_room_for_copy
from memfit.forked_process import end_by_exception, end_with_parent, fork, is_forkable, leave_output, let_signals_end
from memfit.planner.asked_job import AskedJob
from memfit.planner.hand_over import COUNT_EPOCH, KEPT, HandedOver

SECONDS = 600
"""Seconds by the clock that it takes at most to set the job up, and to serve whoever has connected."""
POLL = 0.1
"""Seconds between two looks at the memory that is free."""

SetUp = Callable[[], None]
"""Sets the job up for the next trace of a process."""
Work = Callable[[str, AskedJob], None]
"""What the copy does after the answer: of a request in JSON, with the job that it has loaded."""
EarlyWork = Callable[[AskedJob, Callable[[], bool]], None]
"""What it does before the answer, where there is a core for it: with the job, and what tells whether to go on."""


class LoadedCopy:
    """The copy, seen from the process that answers; it ends with that one unless it is told what to do.

    Args:
        asked: the job, loaded.
        work: what the copy does where it is told to stay.
        set_up: sets the job up for the next trace of a process.
        early: what the copy does until then.

    Raises:
        OSError: no process or pipe can be made.
    """

    def __init__(
        self, asked: AskedJob, work: Work, set_up: SetUp | None = None, early: EarlyWork | None = None
    ) -> None:
        read, write = os.pipe()
        try:
            self._process = fork()
        except OSError:
            os.close(read)
            os.close(write)
            raise
        if not self._process:
            os.close(write)
            _wait(read, asked, work, set_up, early)
        os.close(read)
        self._orders, self._socket = write, asked.socket

    def stay(self, request: str) -> None:
        """Tells the copy to work on after this process has answered, and lets the next question find it."""
        if self._socket is not None:
            show_socket(self._socket, self._process)
        with suppress(OSError):  # it was ended from outside
            os.write(self._orders, request.encode())
        self.close()

    def close(self) -> None:
        """Ends the copy, unless it was told to stay."""
        if self._orders >= 0:
            os.close(self._orders)
        self._orders = -1


def copied(
    asked: AskedJob, work: Work, set_up: SetUp | None = None, early: EarlyWork | None = None
) -> LoadedCopy | None:
    """A copy of this process; None where it cannot do what this one does, or memory is short."""
    if sys.platform != "linux" or not is_forkable() or not has_room_for_copy():
        return None
    with suppress(OSError):
        return LoadedCopy(asked, work, set_up, early)
    return None


def _wait(orders: int, asked: AskedJob, work: Work, set_up: SetUp | None, early: EarlyWork | None) -> NoReturn:
    """The copy: waits until the answer is given, and stays where it is told so."""
    questions = None
    try:
        os.setsid()
        leave_output()
        _close_inherited()
        _limit_threads()
        warnings.simplefilter("ignore")
        has_core = available_cores() > 1
        worker = _Worker(asked, work, early if has_core else None)
        questions = _question_socket(asked)
        if has_core:
            _try(set_up)
        with open(orders, "rb") as file:
            request = file.read()
        if request:
            worker.begin(request)
            asked.look_again()
            if not has_core:
                _try(set_up)
            if questions is not None and questions.is_shown and is_forkable():
                _serve_until_done(questions.listener, asked, worker)
    finally:
        if questions is not None:
            questions.close()
        os._exit(0)


def _try(set_up: SetUp | None) -> None:
    """Sets the job up; where its code does not allow it, a trace does."""
    if set_up is not None:
        signal.alarm(SECONDS)  # it would not see that whoever made it has ended
        with suppress(Exception, SystemExit):
            set_up()
        signal.alarm(0)


class _Worker:
    """A process of its own for the work, forked while nothing is set up. It begins when it is told, and ends with the
    process that made it unless it has begun."""

    def __init__(self, asked: AskedJob, work: Work, early: EarlyWork | None) -> None:
        read, self._request = os.pipe()
        self.working, end = os.pipe()
        """Can be read when the work has ended."""
        if fork():
            os.close(read)
            os.close(end)
            return
        try:
            let_signals_end()
            os.close(self._request)
            os.close(self.working)
            if early is not None:
                _work_early(asked, early, read)
            with open(read, "rb") as file:
                request = file.read().decode()
            if request:
                asked.look_again()
                work(request, asked)
        finally:
            os._exit(0)

    def begin(self, request: bytes) -> None:
        """Lets the work begin."""
        os.write(self._request, request)
        os.close(self._request)


def _work_early(asked: AskedJob, early: EarlyWork, orders: int) -> None:
    """Works until there are orders, or the process that gives them has ended: files that are being written are then
    taken away."""
    signal.signal(signal.SIGTERM, end_by_exception)
    end_with_parent(signal.SIGTERM)
    with suppress(Exception):
        early(asked, lambda: not select.select([orders], [], [], 0)[0])
    end_with_parent(0)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _close_inherited() -> None:
    """Closes what whoever started memfit left open for it, such as a pipe's end or a lock: it waits for their end.

    Files that Python or a job has opened are not inherited by programs that are started.
    """
    for name in os.listdir("/proc/self/fd"):
        number = int(name)
        with suppress(OSError):
            if number > 2 and os.get_inheritable(number):
                os.close(number)


def _limit_threads() -> None:
    """OpenMP's threads do not survive a fork."""
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.set_num_threads(1)


def _question_socket(asked: AskedJob) -> QuestionSocket | None:
    """None where nothing is kept, or it cannot be made."""
    with suppress(OSError):
        return None if asked.socket is None else QuestionSocket(asked.socket)
    return None


def _serve_until_done(listener: socket.socket, asked: AskedJob, worker: _Worker) -> None:
    """Serves questions until the work has ended."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for the copies that serve
    while worker.working not in (ready := select.select([listener.fileno(), worker.working], [], [])[0]):
        if ready:
            _serve_next(listener, asked)


def _serve_next(listener: socket.socket, asked: AskedJob) -> None:
    """Serves whoever has connected, in a copy of its own."""
    with suppress(OSError):
        client, _ = listener.accept()
        with client:
            if fork():
                return
            try:
                signal.signal(signal.SIGTERM, end_by_exception)
                let_signals_end()
                listener.close()
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                signal.alarm(SECONDS)
                _wait_for_memory()
                serve(Connection(client.detach()), asked)
            finally:
                os._exit(0)


def _wait_for_memory() -> None:
    """Waits until the machine has the memory for a trace, as where several are made at once; not for ever: whoever asks
    gives a process up that does nothing, and traces itself."""
    while not has_room_for_copy():
        time.sleep(POLL)


def serve(connection: Connection, asked: AskedJob) -> None:
    """Traces and keeps what is asked for until whoever asks has ended, or asks for what is no step."""
    with suppress(OSError, EOFError, ValueError, TypeError, KeyError), connection:
        connection.send_bytes(str(os.getpid()).encode())
        while True:
            request = connection.recv_bytes()
            if request == COUNT_EPOCH:
                is_done = count_epoch(asked, ASKED)
            else:
                is_done = _is_traced(HandedOver.from_json(request), asked)
            connection.send_bytes(KEPT if is_done else b"")


def _is_traced(step: HandedOver, asked: AskedJob) -> bool:
    """Traces a step and keeps it; False where the job refuses it, or its code was changed."""
    with suppress(Exception):
        asked.look_again()
        asked.several = step.choices.get("world", 1) > 1
        asked.question(step.shape, find_device(step.device), changes=step.changes, derive=step.derive, **step.choices)
        asked.keep()
        return not asked.is_outdated
    return False
