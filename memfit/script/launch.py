"""Starts the traced process and reads its answer."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import IO

import memfit
from memfit.child_process import error_descriptor
from memfit.errors import InputError
from memfit.script.outcome import FileChange, ScriptOutcome, TraceRequest
from memfit.script.outcome_codec import AnswerError, read_answer
from memfit.script.request_json import request_to_json
from memfit.script.worker import NO_SANDBOX

_WORKER = "import sys; sys.path[:] = filter(None, sys.path); from memfit.script.worker import main; main()"
"""What the traced process runs. A file of the current folder must not hide a module of memfit's or of the standard
library's; the option for it, ``-P``, is new in Python 3.11."""
DEFAULT_CARD = "a100-80gb"
"""The card whose kernels a trace uses if the command names none."""
_HOST_SHARE = 0.8
_LEAST_SECONDS = 30.0
"""The least time for a second trace."""
_MORE_TRACES = 2
"""Further traces at most, each of which assumes the selections by values that the one before showed."""
_GRACE_SECONDS = 120.0
"""Time after the limit to compute the answer."""


_REMOVAL_SECONDS = 4.0
"""Time in which a traced process that is told to end deletes its sandbox; within what a verb has to end in."""


_running: dict[subprocess.Popen[bytes], bool] = {}
"""The traced processes that this one waits for, and whether each has a sandbox."""
_WINDOWS = 2
"""Complete windows that a verdict takes."""


def trace_with_need(request: TraceRequest) -> ScriptOutcome:
    """Traces a script. If it exceeds an enforced memory and gives up, traces it again without a limit, so that the
    answer says how much it needs. If it does not fit and handles memory that fails, as by a smaller batch, traces it
    again with the card's memory enforced: what it needs there is the answer.
    """
    outcome = trace_script(request)
    if _may_need_less(request, outcome):
        handled = trace_script(replace(request, enforced=True))
        trains = handled.footprint is not None and handled.windows >= min(outcome.windows, _WINDOWS)
        return handled if trains and handled.error is None else outcome
    if outcome.error is None or not outcome.error.out_of_memory or not request.enforced:
        return outcome
    free = trace_script(replace(request, enforced=False))
    return free if free.footprint is not None else outcome


def _may_need_less(request: TraceRequest, outcome: ScriptOutcome) -> bool:
    """Whether a script that does not fit on the card that was asked for may go on there with less."""
    return (
        request.asked
        and not request.enforced
        and request.device != "cpu"
        and bool(outcome.handler)
        and outcome.footprint is not None
        and outcome.footprint.verdict == "no"
    )


def trace_script(request: TraceRequest, *, output: IO[str] | None = None) -> ScriptOutcome:
    """Traces a script in a process of its own. If it fails after a pass that does not train was cut short, traces it
    again without: the script may have missed what it collects there. If it ends after fewer iterations of LBFGS than
    its history holds, traces it again with as many as it makes. If its lines select by one value of integers after
    another (by experts), traces it again with an equal share for each.

    Args:
        output: where the script's output goes; None: standard error.

    Raises:
        InputError: this machine offers no sandbox, or the traced process was killed.
    """
    outcome = _trace_with_walks(request, output)
    rest = max(request.limit_seconds - outcome.seconds, _LEAST_SECONDS)
    if outcome.lbfgs_iterations and request.lbfgs_iterations is None:
        return _trace_with_walks(
            replace(request, lbfgs_iterations=outcome.lbfgs_iterations, limit_seconds=rest), output
        )
    failed = outcome.error is not None and not outcome.error.out_of_memory
    if not (failed and outcome.passes_cut and request.batches is None):
        return outcome
    whole = _trace_with_walks(replace(request, whole_passes=True, limit_seconds=rest), output)
    return whole if whole.windows >= outcome.windows and (whole.windows or whole.error) else outcome


def _trace_with_walks(request: TraceRequest, output: IO[str] | None) -> ScriptOutcome:
    """Traces until what a trace assumes of lines that select by values is what it shows; without that, the first."""
    first = outcome = _trace_once(request, output)
    for _ in range(_MORE_TRACES):
        if outcome.walks == request.walks or outcome.windows < first.windows:
            break
        rest = max(request.limit_seconds - outcome.seconds, _LEAST_SECONDS)
        request = replace(request, walks=outcome.walks, limit_seconds=rest)
        outcome = _trace_once(request, output)
    return outcome if outcome.walks == request.walks and outcome.windows >= first.windows else first


def _trace_once(request: TraceRequest, output: IO[str] | None) -> ScriptOutcome:
    with tempfile.TemporaryFile() as asked, tempfile.TemporaryFile() as answered:
        asked.write(request_to_json(request).encode())
        asked.flush()
        asked.seek(0)
        command = [
            sys.executable, "-c", _WORKER, str(asked.fileno()), str(answered.fileno()),
        ]  # fmt: skip
        files = (asked.fileno(), answered.fileno())
        process = subprocess.Popen(
            command, pass_fds=files, stdout=output or error_descriptor(), stdin=subprocess.DEVNULL,
            env=script_environment(), start_new_session=True,
        )  # fmt: skip  # Ctrl-C comes to this process alone, which ends that one
        _running[process] = not request.unsafe_writes
        try:
            code = process.wait(timeout=request.limit_seconds + _GRACE_SECONDS)
        except subprocess.TimeoutExpired:
            _end({process: not request.unsafe_writes})
            raise InputError(
                f"the script did not stop at its limit of {request.limit_seconds:.0f} s",
                "it was killed without a result",
                "write a smaller job, or give memfit trace --limit more time",
            ) from None
        except BaseException:
            _end({process: not request.unsafe_writes})
            raise
        finally:
            _running.pop(process, None)
        answered.seek(0)
        if code == NO_SANDBOX:
            raise InputError(
                "a trace without a sandbox",
                f"this machine offers none ({answered.read().decode()}), and the script's writes would be real",
                "write memfit trace --unsafe-writes to run it all the same",
            )
        return _read(answered, code)


def end_traces() -> None:
    """Ends every traced process that a thread of this process waits for."""
    _end(dict(_running))


def _end(processes: Mapping[subprocess.Popen[bytes], bool]) -> None:
    """Ends traced processes. One that has a sandbox deletes its folder first; a script without one might handle the
    signal that asks for it.

    Args:
        processes: whether each has a sandbox.
    """
    for process, has_sandbox in processes.items():
        process.terminate() if has_sandbox else process.kill()
    end = time.monotonic() + _REMOVAL_SECONDS
    for process in processes:
        try:
            process.wait(max(0.0, end - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()


def _read(answered: IO[bytes], code: int) -> ScriptOutcome:
    """The outcome that the traced process wrote.

    Args:
        code: how the process ended, unless the sandbox around the script says it.
    """
    try:
        outcome = read_answer(answered)
        if not isinstance(outcome, ScriptOutcome):
            code = outcome[0]
            raise AnswerError("not the answer of a script")
        _, files = read_answer(answered)
        if not all(isinstance(change, FileChange) for change in files):
            raise AnswerError("not the files of a script")
    except (AnswerError, LookupError, TypeError, ValueError) as error:
        raise _unanswered(code) from error
    return replace(outcome, files=tuple(change for change in files if not _is_noise(change.path)))


def _unanswered(code: int) -> InputError:
    """The error of a traced process that ended without an answer; a negative code is the signal that ended it."""
    if code >= 0:
        return InputError(
            f"the traced process ended with code {code} and no answer",
            "the script or a library ended it at once, as os._exit does",
            "read the script's output, and leave that call out",
        )
    killed = code == -signal.SIGKILL
    return InputError(
        f"the traced process was ended by {_signal_name(-code)} and gave no answer",
        "the host may have run out of memory" if killed else "the script or compiled code of a library failed",
        "trace a smaller job" if killed else "read the script's output, and run the script by itself",
    )


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # such as one of real time
        return f"signal {number}"


def _is_noise(path: str) -> bool:
    return "__pycache__" in path or path.startswith(("/proc/", "/dev/"))


def script_environment() -> dict[str, str]:
    """This process's environment, with memfit on the path; the script's own folder still comes first."""
    root = str(Path(memfit.__file__).parents[1])
    before = os.environ.get("PYTHONPATH", "")
    return {
        **os.environ, "PYTHONPATH": f"{root}{os.pathsep}{before}" if before else root,
        "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1", "WANDB_MODE": "offline", "PYTHONUNBUFFERED": "1",
        "TORCH_CPP_LOG_LEVEL": os.environ.get("TORCH_CPP_LOG_LEVEL", "ERROR"),
    }  # fmt: skip


def free_host_bytes() -> int | None:
    """Most of the host's free memory; None if the system does not say."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    free = next((line.split()[1] for line in lines if line.startswith("MemAvailable")), None)
    return None if free is None else int(int(free) * 1024 * _HOST_SHARE)
