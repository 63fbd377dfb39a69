"""The traced process: enters the sandbox, runs the script on the virtual device, and hands back the outcome.

``launch`` starts ``main`` with the numbers of two open files: the request's and the result's. Nothing that starts a
thread may be imported before the sandbox is entered.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import NoReturn

from memfit.frame_room import in_frame_room
from memfit.garbage import frozen_imports
from memfit.script import namespaces
from memfit.script.outcome import FileChange, TraceRequest
from memfit.script.outcome_codec import write_answer
from memfit.script.request_json import request_from_json
from memfit.script.sandbox import OverlayLayer, SandboxError, changes, enter_sandbox

NO_SANDBOX = 90
"""Exit code: this machine offers no sandbox."""
_REMOVALS = 20
_REMOVAL_PAUSE_SECONDS = 0.1


def main() -> None:
    request_file, result_file = (int(argument) for argument in sys.argv[1:3])
    with os.fdopen(request_file, "rb") as opened:
        request = request_from_json(opened.read())
    namespaces.set_parent_death_signal() if namespaces.is_supported() else None
    os.environ.update(request.command.environment)
    if request.unsafe_writes:
        run(request, result_file)
        return
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    scratch = Path(tempfile.mkdtemp(prefix="memfit-sandbox-"))
    child = os.fork()
    if child:
        _remove_after(child, scratch, mask)
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    namespaces.set_parent_death_signal()
    try:
        layers = enter_sandbox(scratch, writable=[Path(folder) for folder in request.writable])
    except SandboxError as error:
        os.write(result_file, str(error).encode())
        os._exit(NO_SANDBOX)
    os._exit(_run_inside(request, result_file, layers))


def _remove_after(child: int, scratch: Path, mask: set[int | signal.Signals]) -> NoReturn:
    """Waits for the process in the sandbox, deletes the sandbox's folder, and ends with that process's code.

    SIGTERM, which also comes where memfit is killed, ends that process first.

    Args:
        mask: the signals that are to be blocked from now on.
    """
    signal.signal(signal.SIGTERM, lambda *_: os.kill(child, signal.SIGKILL))
    namespaces.set_parent_death_signal(signal.SIGTERM) if namespaces.is_supported() else None
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    _, status = os.waitpid(child, 0)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    for _ in range(_REMOVALS):
        shutil.rmtree(scratch, onerror=_make_removable)
        if not scratch.exists():
            break
        time.sleep(_REMOVAL_PAUSE_SECONDS)  # what ran in the sandbox is ending
    os._exit(os.waitstatus_to_exitcode(status) & 0xFF)


def _run_inside(request: TraceRequest, result_file: int, layers: list[OverlayLayer]) -> int:
    """Forks again: the script must not hold the real folders below its overlays."""
    child = os.fork()
    if child == 0:
        namespaces.set_parent_death_signal()
        for layer in layers:
            os.close(layer.descriptor)
        run(request, result_file)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    code = os.waitstatus_to_exitcode(status)
    changed = [FileChange(path=change.path, bytes=change.bytes, deleted=change.deleted) for change in changes(layers)]
    with os.fdopen(os.dup(result_file), "ab") as opened:
        write_answer((code, changed), opened)
    return 0


def _make_removable(function: object, path: str, error: object) -> None:
    """Lets the owner list the kernel's working folder of an overlay, so that it can be deleted."""
    try:
        os.chmod(os.path.dirname(path), 0o700)
        os.chmod(path, 0o700)
        shutil.rmtree(path, ignore_errors=True) if os.path.isdir(path) else os.remove(path)
    except OSError:
        pass


@in_frame_room
def run(request: TraceRequest, result_file: int) -> None:
    """Traces the script and writes its outcome."""
    with frozen_imports():
        from memfit.script.run_script import run_script

    def report(outcome: object) -> None:
        with os.fdopen(os.dup(result_file), "ab") as opened:
            write_answer(outcome, opened)

    run_script(request, report)
    sys.stdout.flush()
    sys.stderr.flush()
    if request.unsafe_writes:
        report((0, []))
    os._exit(0)
