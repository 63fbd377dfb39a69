"""Several traces of scripts at once, each in a process of its own: as many as this machine has cores and memory for."""

from __future__ import annotations

import resource
import shutil
import sys
import tempfile
import threading
from collections.abc import Sequence
from contextlib import suppress
from typing import IO

from memfit.device.hardware.process_limits import available_bytes, available_cores
from memfit.script.launch import end_traces, trace_script
from memfit.script.outcome import ScriptOutcome, TraceRequest

MEMORY = 2
"""A further trace begins where so many times the memory is available that the largest one took so far."""


def trace_scripts(requests: Sequence[TraceRequest]) -> list[ScriptOutcome]:
    """Outcomes in the order of the requests. Where this process has traced nothing yet, the first is traced alone: it
    shows what memory a trace takes.

    What scripts write on their standard output and error while they are traced side by side appears when each has
    ended, in the order of the requests.

    Raises:
        InputError: as by ``trace_script``, of the first request for which it is raised.
    """
    outcomes: list[ScriptOutcome] = []
    if requests and not _peak_bytes():
        outcomes.append(trace_script(requests[0]))
    while len(outcomes) < len(requests):
        outcomes += _side_by_side(requests[len(outcomes) :][: at_once()])
    return outcomes


def at_once() -> int:
    """Traces that this machine has cores and memory for, at least one."""
    peak = _peak_bytes()
    return max(1, min(available_cores(), available_bytes() // (MEMORY * peak) if peak else 1))


def _peak_bytes() -> int:
    """Memory that the largest process took of those that this one has started and that have ended; 0: none has."""
    return resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss << 10


def _side_by_side(requests: Sequence[TraceRequest]) -> list[ScriptOutcome]:
    if len(requests) == 1:
        return [trace_script(requests[0])]
    outcomes: dict[int, ScriptOutcome] = {}
    errors: dict[int, BaseException] = {}
    outputs = [tempfile.TemporaryFile("w+", errors="replace") for _ in requests]  # noqa: SIM115

    def run(number: int) -> None:
        try:
            outcomes[number] = trace_script(requests[number], output=outputs[number])
        except BaseException as error:
            errors[number] = error

    # An interrupt reaches this thread alone. It ends the traces, and the threads with them.
    threads = [threading.Thread(target=run, args=(number,), daemon=True) for number in range(len(requests))]
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    except BaseException:
        end_traces()
        raise
    for output in outputs:
        with output:
            _pass_on(output)
    if errors:
        raise errors[min(errors)]
    return [outcomes[number] for number in range(len(requests))]


def _pass_on(output: IO[str]) -> None:
    """Writes what a script wrote to where it would have gone."""
    output.seek(0)
    with suppress(OSError, ValueError):
        shutil.copyfileobj(output, sys.stderr)
        sys.stderr.flush()
