"""A copy of this process that runs calls beside it, on another core.

The copy has everything that this process has in memory: only the arguments of a call and its result are pickled. It
says nothing, and it ends with this process, however that ends.
"""

from __future__ import annotations

import ctypes
import os
import pickle
import random
import signal
import sys
import tempfile
import threading
import warnings
from collections import deque
from collections.abc import Callable
from contextlib import closing, suppress
from multiprocessing.connection import Connection, Pipe
from typing import IO, Any, NoReturn

from memfit.child_process import DIE_WITH_PARENT
from memfit.device.hardware.process_limits import available_cores, has_room_for_copy
from memfit.work_stages import fall_silent

_FAILED = -1
"""The size that stands for a call without a result."""
_STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class NoResultError(Exception):
    """The copy has no result for a call: the call raised, its result cannot be pickled, or the copy has ended."""


class ForkedCall:
    """A call that the copy was asked for."""

    def __init__(self, read: Callable[[ForkedCall], None]) -> None:
        self._read = read
        self._value: Any = None
        self._has_value = False
        self.is_done = False

    @property
    def has_failed(self) -> bool:
        """Whether there is no result; waits for it."""
        with suppress(NoResultError):
            self.result()
        return not self._has_value

    def finish(self, pickled: bytes | None) -> None:
        """Notes the result; None: there is none."""
        self.is_done = True
        if pickled is not None:
            self._value, self._has_value = pickle.loads(pickled), True

    def result(self) -> Any:
        """What the call returned; waits for it.

        Raises:
            NoResultError: there is no result.
        """
        if not self.is_done:
            self._read(self)
        if not self._has_value:
            raise NoResultError
        return self._value


class ForkedProcess:
    """The copy, forked when this object is made. It runs methods of ``target``, in the order of their calls.

    Results lie in a file that both have open, so that the copy never waits for somebody who reads them.

    Raises:
        OSError: no process, file or pipe can be made.
    """

    def __init__(self, target: object) -> None:
        self._waiting: deque[ForkedCall] = deque()
        self._results = tempfile.TemporaryFile()  # noqa: SIM115
        self._connection, other = Pipe()
        parent = os.getpid()
        try:
            self._id = fork()
        except OSError:
            self._results.close()
            self._connection.close()
            other.close()
            raise
        if self._id == 0:
            self._connection.close()
            _serve(target, parent, other, self._results)
        other.close()

    @property
    def process_id(self) -> int:
        """The copy's; 0 after ``close``."""
        return self._id

    def call(self, method: str, *arguments: Any) -> ForkedCall:
        """Asks for a call, and does not wait for it."""
        call = ForkedCall(self._read_until)
        try:
            request = pickle.dumps((method, arguments))
            self._connection.send_bytes(request)
        except Exception:  # the copy has ended, or an argument of the job's own cannot be pickled
            call.finish(None)
        else:
            self._waiting.append(call)
        return call

    def close(self) -> None:
        """Ends the copy, whatever it does."""
        self._id = _ended(self._id)
        self._connection.close()
        self._results.close()
        while self._waiting:
            self._waiting.popleft().finish(None)

    def _read_until(self, wanted: ForkedCall) -> None:
        """Reads results until this one."""
        while not wanted.is_done:
            try:
                begin, size = self._connection.recv()
            except (EOFError, OSError):
                begin, size = 0, _FAILED
            pickled = os.pread(self._results.fileno(), size, begin) if size != _FAILED else None
            self._waiting.popleft().finish(pickled)


class ForkedBranch:
    """A copy of this process that goes on from where it is made, once it is told to, and gives one result.

    Both processes return from the constructor. The copy must not go on behind ``give`` or ``end``.

    Raises:
        OSError: no process or pipe can be made.
    """

    def __init__(self) -> None:
        self._connection, other = Pipe()
        parent = os.getpid()
        try:
            self._id = fork()
        except OSError:
            self._connection.close()
            other.close()
            raise
        self.is_copy = self._id == 0
        self.has_begun = self.is_done = False
        self._result: bytes | None = None
        if not self.is_copy:
            other.close()
            return
        self._connection.close()
        self._connection = other
        try:
            _leave_to_parent(parent)
            other.recv_bytes()
        except BaseException:
            self.end()

    @property
    def connection(self) -> Connection:
        """Can be read once the copy has given a result or has ended."""
        return self._connection

    def begin(self) -> None:
        """Lets the copy go on."""
        self.has_begun = True
        try:
            self._connection.send_bytes(b"")
        except OSError:  # it has ended
            self.is_done = True

    def read(self) -> None:
        """Notes what the copy has given; waits for it."""
        if not self.is_done:
            self.is_done = True
            try:
                self._result = self._connection.recv_bytes()
            except (EOFError, OSError):
                self._result = None

    def result(self) -> Any:
        """What the copy has given; waits for it.

        Raises:
            NoResultError: it has ended without.
        """
        self.read()
        if self._result is None:
            raise NoResultError
        return pickle.loads(self._result)

    def give(self, value: object) -> NoReturn:
        """Of the copy: gives its result, and ends."""
        try:
            self._connection.send_bytes(pickle.dumps(value))
        finally:
            os._exit(0)

    def end(self) -> NoReturn:
        """Of the copy: ends without a result."""
        os._exit(0)

    def close(self) -> None:
        """Ends the copy, whatever it does."""
        self._id = _ended(self._id)
        self._connection.close()


def with_copy(own: Callable[[], object], other: Callable[[], Any]) -> Any:
    """Does one thing here and another in a copy of this process meanwhile; gives what the copy returned.

    Raises:
        OSError: no process or pipe can be made; nothing was done.
        NoResultError: the copy raised, or has ended; what is done here is done.
        Exception: what ``own`` raises.
    """
    with closing(ForkedBranch()) as branch:
        if branch.is_copy:
            try:
                branch.give(other())
            finally:
                branch.end()
        branch.begin()
        own()
        return branch.result()


def _ended(process_id: int) -> int:
    """Ends a copy; 0, which stands for one that has ended."""
    if process_id:
        os.kill(process_id, signal.SIGKILL)
        os.waitpid(process_id, 0)
    return 0


def is_forkable() -> bool:
    """Whether a copy of this process can do what it does: no thread runs that a job's code started and the copy would
    not have. A progress bar's own does not count."""
    main = threading.main_thread()
    return all(
        thread is main or type(thread).__module__.startswith(("rich.", "tqdm.")) for thread in threading.enumerate()
    )


def has_core_for_copy() -> bool:
    """Whether this machine has a core and memory for a copy of this process, and it could do what this one does."""
    return available_cores() >= 2 and has_room_for_copy() and is_forkable()


def fork() -> int:
    """``os.fork``, with the signals that a copy must not act on as its parent does held back in the copy; both go on
    with the same random numbers."""
    parent, numbers = os.getpid(), random.getstate()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _STOPPING)
    with warnings.catch_warnings():
        # Python 3.12 warns wherever threads run, as those of a progress bar and of numpy. The copy waits for no lock
        # that they may hold: it says nothing (``fall_silent``).
        warnings.filterwarnings("ignore", message=".*multi-threaded", category=DeprecationWarning)
        try:
            process_id = os.fork()
        finally:
            if os.getpid() == parent:
                signal.pthread_sigmask(signal.SIG_SETMASK, before)
    if process_id == 0:
        random.setstate(numbers)  # Python seeds them anew in a forked process
    return process_id


def let_signals_end() -> None:
    """Lets the signals in that ``fork`` holds back in a copy, once it may act on them."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _STOPPING)


def _serve(target: object, parent: int, connection: Connection, results: IO[bytes]) -> NoReturn:
    """The copy: runs calls until the other process has ended."""
    try:
        _leave_to_parent(parent)
        begin = 0
        while True:
            request = connection.recv_bytes()
            try:
                method, arguments = pickle.loads(request)
                pickled = pickle.dumps(getattr(target, method)(*arguments))
                results.write(pickled)
                results.flush()
            except Exception:  # whoever asked makes the call itself, and meets the same exception
                connection.send((begin, _FAILED))
                begin = results.seek(0, os.SEEK_END)
            else:
                connection.send((begin, len(pickled)))
                begin += len(pickled)
    finally:
        os._exit(0)


def _leave_to_parent(parent: int) -> None:
    """Leaves signals and output to the parent, and ends with it."""
    end_with_parent(signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(0)
    leave_output()


def end_with_parent(number: int) -> None:
    """Has the system send this process a signal when the process that made it ends (Linux).

    Args:
        number: of the signal; 0: none is sent.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(DIE_WITH_PARENT, number)


def end_by_exception(number: int, frame: object) -> None:
    """A handler of signals that ends the process by an exception, so that files which are being written are taken
    away."""
    raise SystemExit(1)


def leave_output() -> None:
    """Leaves output, and the signals of a terminal, to the process that this one is a copy of."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
    let_signals_end()
    fall_silent()
    nothing = os.open(os.devnull, os.O_RDWR)
    for descriptor in range(3):
        os.dup2(nothing, descriptor)
    os.close(nothing)
    sys.stdout = sys.stderr = open(os.devnull, "w")  # noqa: SIM115
