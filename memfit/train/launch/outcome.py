"""RUN/.ended-ID: how a launch ended, written by the rank that ends first and read by whoever started it.

The exit code of a process proves nothing: a data set that calls ``os._exit(0)`` ends with the code of a run that is
done. So the training process writes how it ended, and ``missing_from`` compares that with what is on disk.
torchrun starts all ranks again when one ends with a code other than 0; ranks of a launch that has an outcome end at
once with its code.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import sys
import tempfile
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from memfit.atomic_file import write_atomic
from memfit.printable import printable
from memfit.train.append_file import identity
from memfit.train.metrics_file import last_window

SPARE = "MEMFIT_SPARE_FOLDER"
"""Environment variable with a second folder for outcomes, where RUN cannot be written."""
_MANIFEST = "manifest.json"
_LAUNCH = "TORCHELASTIC_RUN_ID"


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How a launch ended."""

    code: int
    windows: int | None = None
    """Windows that the run has trained in all; None: it is not done."""
    trained: int = 0
    """Windows of them that this launch trained."""
    checkpoint: str | None = None
    """Name of the final checkpoint."""
    final: Mapping[str, int] = field(default_factory=dict)
    """Bytes of each file of final weights, by name."""
    unsaid: str = ""
    """The line of a process that could not print it, since its job has closed standard error."""


@contextlib.contextmanager
def spare_folder() -> Iterator[None]:
    """Names a temporary folder for outcomes. Without it, ranks whose disk is full are started again in vain.

    A rank makes it when it needs it: a launch that is killed before leaves nothing.
    """
    try:
        path = Path(tempfile.gettempdir(), f"memfit-outcome-{uuid.uuid4().hex}")
    except OSError:
        yield
        return
    os.environ[SPARE] = str(path)
    try:
        yield
    finally:
        os.environ.pop(SPARE, None)
        shutil.rmtree(path, ignore_errors=True)


def clear_outcome(folder: Path) -> None:
    """Removes the outcomes of launches before this one."""
    for left in folder.glob(".ended-*"):
        with contextlib.suppress(OSError):
            left.unlink()


def read_outcome(folder: Path) -> Outcome | None:
    """How this launch ended; None where no rank has said so. Whoever starts the ranks has no name of their launch."""
    for place in _folders(folder):
        files = [_file(place)] if _LAUNCH in os.environ else sorted(place.glob(".ended-*"))
        for file in files:
            with contextlib.suppress(OSError, ValueError, TypeError):
                return Outcome(**json.loads(file.read_text()))
    return None


def write_outcome(folder: Path, outcome: Outcome, line: str = "") -> None:
    """Writes how this launch ends. The first rank that does so prints the line."""
    for place in _folders(folder):
        try:
            if place != folder:
                place.mkdir(mode=0o700, exist_ok=True)
            with open(_file(place), "x") as file:
                json.dump(asdict(outcome), file)
        except FileExistsError:
            return
        except OSError:
            continue
        if line and not _print(line):
            with contextlib.suppress(OSError):
                write_atomic(_file(place), json.dumps(asdict(replace(outcome, unsaid=line))))
        return
    if line:
        say(line)


_spare_stderr: list[int] = []
HIGH = 1000
"""A number of a descriptor that a job which closes the first hundreds does not reach."""


def keep_stderr() -> None:
    """Keeps standard error open for ``say``, should the job close it."""
    if not _spare_stderr:
        with contextlib.suppress(OSError):
            _spare_stderr.append(os.dup(2))
            _spare_stderr.append(fcntl.fcntl(2, fcntl.F_DUPFD_CLOEXEC, HIGH))


def say(line: str) -> None:
    """One line on standard error. A terminal may be gone, and the job may have closed the stream or its descriptor."""
    _print(line)


def _print(line: str) -> bool:
    """Prints a line as ``say`` does; whether that went well."""
    line = printable(line).replace("\n", "\\n")
    try:
        print(f"memfit: {line}", file=sys.stderr, flush=True)
        return True
    except (OSError, ValueError):
        for descriptor in _spare_stderr:
            with contextlib.suppress(OSError):
                os.write(descriptor, f"memfit: {line}\n".encode())
                return True
    return False


def is_heard() -> bool:
    """Whether what is printed on standard error can be read by somebody, as far as this process knows."""
    return not sys.stderr.closed and identity(2) is not None


def missing_from(folder: Path, outcome: Outcome) -> str | None:
    """What a launch that says it is done has not left on disk, in words; None: everything is there and agrees."""
    if outcome.windows is None:
        return "it does not say how many windows it trained"
    last = last_window(folder / "metrics.jsonl")
    if outcome.trained and last != outcome.windows - 1:
        return f"the last line of metrics.jsonl is of window {last}, and not of window {outcome.windows - 1}"
    if outcome.checkpoint is None:
        return "the final checkpoint was not written"
    manifest = folder / "checkpoints" / outcome.checkpoint / _MANIFEST
    if not manifest.is_file():
        return f"the final checkpoint {manifest.parent} is not there"
    for name, nbytes in outcome.final.items():
        file = folder / "final" / name
        if not file.is_file() or file.stat().st_size != nbytes:
            return f"the final weights {file} are not there, or not whole"
    return None


def _folders(folder: Path) -> list[Path]:
    return [folder, *([Path(os.environ[SPARE])] if SPARE in os.environ else [])]


def _file(folder: Path) -> Path:
    return folder / f".ended-{os.environ.get(_LAUNCH, 'once')}"
