"""Traces for the next questions, made by a process of its own: nobody waits for it.

It begins with other cards where the machine has a core that the answer does not take, and goes on after the answer. It
has the lowest priority, runs alone of its kind, and ends by itself: when all is traced, when a person has asked of
another job or changed this one's code, after ``SECONDS`` of the processor, or after ``WAIT`` by the clock. What it has
traced until then is kept, each file whole.
"""

from __future__ import annotations

import fcntl
import json
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from memfit.device.hardware.catalogue import Device, find_device
from memfit.forked_process import end_by_exception
from memfit.frame_room import in_frame_room
from memfit.job import Shape
from memfit.user_cache import cache_folder

if TYPE_CHECKING:
    from memfit.cli.loaded_copy import LoadedCopy
    from memfit.planner.asked_job import AskedJob
    from memfit.planner.job_facts import Policy

SWITCH = "MEMFIT_TRACE_AHEAD"
"""The environment variable that turns this off with 0."""
SECONDS = 300
"""Seconds of the processor that the process may take."""
WAIT = 600
"""Seconds by the clock after which it ends."""
FAR = 32
"""Micro-batches are traced up to this multiple of what no card holds."""
MEMORY = 2
"""It begins where so many times the memory is available that the answer took."""
LOCK = "tracing"
"""The file in the cache that is locked while such a process runs. It names the newest job that was asked of."""


@dataclass(frozen=True, kw_only=True)
class AheadRequest:
    """A question that was answered; ``choices`` as of ``AskedJob.question``."""

    job: str
    pairs: tuple[str, ...]
    precision: str | None
    shape: Shape
    device: str
    choices: Mapping[str, Any]
    code: str = ""
    """What names the job with its code, as ``AskedJob.code`` does."""


class NextQuestions:
    """What is traced for the next questions to a job, after the answer to this one.

    Args:
        environment: as this process began with it: traces are kept by it.
        are_wanted: False: nothing is traced.
    """

    def __init__(self, environment: Mapping[str, str], *, are_wanted: bool = True) -> None:
        self._environment, self._are_wanted = environment, are_wanted
        self._copy: LoadedCopy | None = None
        self.asked: AheadRequest | None = None
        """The question that is being answered, where that is one step on one card: other cards are traced meanwhile."""

    def before_tracing(self, asked: AskedJob, set_up: Callable[[], None] | None) -> None:
        """Makes a copy of this process, which has the job loaded, and sets it up for the next trace."""
        from memfit.cli.loaded_copy import copied

        if self._are_wanted and asked.is_kept and self._environment.get(SWITCH, "1") != "0":
            early = partial(_trace_early, self.asked) if self.asked is not None and set_up is not None else None
            self._copy = copied(asked, _trace_in_copy, set_up, early)

    def trace(self, asked: AskedJob, request: AheadRequest) -> None:
        """Starts the process after an answer that needed a trace which is kept; nothing where the machine has no memory
        for it."""
        if self._are_wanted and asked.traced and asked.is_kept:
            request = replace(request, code=asked.code)
            if self._copy is None:
                trace_in_background(request, self._environment)
            elif _has_room():
                self._copy.stay(json.dumps(asdict(request)))
        if self._copy is not None:
            self._copy.close()


def trace_in_background(request: AheadRequest, environment: Mapping[str, str]) -> None:
    """Starts the process, and does not wait for it; nothing where the machine has no memory for it.

    Args:
        environment: as this process began with it: traces are kept by it.
    """
    if environment.get(SWITCH, "1") == "0" or not _has_room():
        return
    command = [sys.executable, "-m", __name__, json.dumps(asdict(request))]
    with suppress(OSError):
        process = subprocess.Popen(
            command, env=dict(environment), start_new_session=True,
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        process.returncode = 0  # it outlives this one, which is no mistake to warn of


def _has_room() -> bool:
    """Whether the machine has the memory for another process like this one."""
    from memfit.device.hardware.process_limits import available_bytes

    return available_bytes() >= MEMORY * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10)


def _trace_early(request: AheadRequest, asked: AskedJob, goes_on: Callable[[], bool]) -> None:
    """The process before the answer: traces the step on other cards and at another size, unless one is at work."""
    from memfit.cli.progress import progress
    from memfit.device.hardware.process_limits import has_room_for_copy
    from memfit.planner.trace_ahead import AheadTraces

    step_aside()
    _end_in_time()
    asked.several = True
    with _lock_file() as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return
        try:
            with progress("tracing", quiet=True):
                ahead = AheadTraces(asked, lambda: goes_on() and has_room_for_copy())
                ahead.trace_meanwhile(request.shape, find_device(request.device), **request.choices)
        finally:
            fcntl.flock(file, fcntl.LOCK_UN)  # copies of this process have the file open, too


def _trace_in_copy(request: str, asked: AskedJob) -> None:
    """The process where it is a copy of the one that answered."""
    step_aside()
    main([request], asked)


@in_frame_room
def main(arguments: Sequence[str], asked: AskedJob | None = None) -> None:
    """The process: reads the request, and traces while nothing speaks against it.

    Args:
        asked: the job, where it is loaded.
    """
    request = json.loads(arguments[0])
    _end_in_time()
    with _alone(request["code"]) as is_newest:
        if is_newest():
            _trace(request, is_newest, asked)


def _trace(request: Mapping[str, Any], is_newest: Callable[[], bool], loaded: AskedJob | None) -> None:
    """Traces what was asked for every card and size; then what ``memfit max`` and ``memfit cards`` ask first (the
    latter also of the data set), then what ``memfit max`` asks of the other cards, then micro-batches far beyond what
    they hold."""
    from memfit.cli.counted_epoch import UNASKED, count_epoch
    from memfit.cli.job_options import asked_job, micro_batch_shape
    from memfit.cli.options import choose_devices
    from memfit.cli.progress import progress
    from memfit.planner.card_comparison import compare_cards
    from memfit.planner.trace_ahead import AheadTraces

    shape, device = Shape(**request["shape"]), find_device(request["device"])
    job = loaded or asked_job(request["job"], request["pairs"], request["precision"])
    job.several = True
    with progress("tracing", quiet=True), job as asked:

        def goes_on() -> bool:
            return not asked.is_outdated and is_newest() and processor_seconds() < SECONDS

        ahead = AheadTraces(asked, goes_on)
        others = ahead.trace_cards(shape, device, **request["choices"])
        for card in (device, *others):
            ahead.trace_sizes(shape, card, **request["choices"])
            ahead.trace_sizes(shape, card, times=FAR, **request["choices"])
        facts, cards = asked.facts, choose_devices(("all",), None, None)
        start = micro_batch_shape(facts, None, None)
        # the job's own first, of which memfit cards asks
        policies = sorted(facts.policies, key=lambda policy: bool(policy.changes) or policy.checkpointing != facts.own)

        def find_largest(policy: Policy, card: Device) -> None:
            ahead.trace_sizes(start, card, checkpointing=policy.checkpointing, changes=policy.changes)
            _find_largest(policy, card, asked)

        def trace_far(policy: Policy, card: Device) -> None:
            ahead.trace_sizes(start, card, times=FAR, checkpointing=policy.checkpointing, changes=policy.changes)

        work: list[Callable[[], object]] = [
            *(partial(find_largest, policy, device) for policy in policies),
            *(partial(find_largest, policies[0], card) for card in others),
            partial(compare_cards, asked, start, cards),
            partial(count_epoch, asked, UNASKED),
            *(partial(find_largest, policy, card) for policy in policies[1:] for card in others),
            *(partial(_find_largest, policy, card, asked) for policy in policies for card in cards),
            *(partial(trace_far, policy, card) for policy in policies for card in (device, *others)),
        ]
        for part in work:
            if goes_on():
                part()


def _find_largest(policy: Policy, card: Device, asked: AskedJob) -> None:
    """The largest micro-batch, which is kept as it is found."""
    from memfit.planner.largest import by_items, largest_of, with_certain

    sizes = by_items(asked.facts.longest)
    with suppress(Exception):  # the job's code may refuse what nobody asked for
        with_certain(largest_of(policy, card, asked, sizes), asked, sizes)
    asked.keep()


def processor_seconds() -> float:
    """Seconds of the processor that this process has taken, and copies of it that trace for it: a limit of the process
    does not count those."""
    import psutil

    own = psutil.Process()
    times = [process.cpu_times() for process in (own, *own.children(recursive=True))]
    ended = sum(each.children_user + each.children_system for each in times)
    return float(sum(each.user + each.system for each in times) + ended)


def _end_in_time() -> None:
    """Has this process end after ``SECONDS`` of the processor, and ``WAIT`` by the clock from now."""
    signal.signal(signal.SIGALRM, end_by_exception)
    signal.signal(signal.SIGXCPU, end_by_exception)
    signal.alarm(WAIT)
    with suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_CPU, (SECONDS, SECONDS + 10))


def step_aside() -> None:
    """Leaves the processor to all others: nice counts within a session, and a session's group has a nice of its own."""
    with suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, 0, 19)
    with suppress(OSError), open("/proc/self/autogroup", "w") as file:
        file.write("19")


def _lock_file() -> IO[str]:
    folder = cache_folder() / "traces"
    folder.mkdir(parents=True, exist_ok=True)
    return (folder / LOCK).open("a")


@contextmanager
def _alone(code: str) -> Iterator[Callable[[], bool]]:
    """Context in which no other such process runs; gives what tells whether ``code`` is still the newest that was asked
    of. One that is at work on other code ends where it sees this; one at the same goes on."""
    with _lock_file() as file:
        path = Path(file.name)

        def is_newest() -> bool:
            return path.read_text() == code

        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            if is_newest():
                yield lambda: False
                return
            path.write_text(code)
            fcntl.flock(file, fcntl.LOCK_EX)
        else:
            path.write_text(code)
        yield is_newest


if __name__ == "__main__":
    step_aside()
    main(sys.argv[1:])
