"""RUN/.ended-ID: how a launch ended, written by the rank that ends first and read by whoever started it.

The exit code of a process proves nothing: a data set that calls ``os._exit(0)`` ends with the code of a run that is
done. So the training process writes how it ended, and ``missing_from`` compares that with what is on disk.
torchrun starts all ranks again when one ends with a code other than 0; ranks of a launch that has an outcome end at
once with its code.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

from memfit.printable import printable
from memfit.train.metrics_file import read_lines

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


@contextlib.contextmanager
def spare_folder() -> Iterator[None]:
    """Makes a temporary folder for outcomes. Without it, ranks whose disk is full are started again in vain."""
    try:
        made = tempfile.TemporaryDirectory(prefix="memfit-outcome-", ignore_cleanup_errors=True)
    except OSError:
        yield
        return
    with made as path:
        os.environ[SPARE] = path
        try:
            yield
        finally:
            os.environ.pop(SPARE, None)


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
            with open(_file(place), "x") as file:
                json.dump(asdict(outcome), file)
            break
        except FileExistsError:
            return
        except OSError:
            continue
    if line:
        say(line)


_spare_stderr: list[int] = []


def keep_stderr() -> None:
    """Keeps standard error open for ``say``, should the job close it."""
    if not _spare_stderr:
        with contextlib.suppress(OSError):
            _spare_stderr.append(os.dup(2))


def say(line: str) -> None:
    """One line on standard error. A terminal may be gone, and the job may have closed the stream or its descriptor."""
    line = printable(line).replace("\n", "\\n")
    try:
        print(f"memfit: {line}", file=sys.stderr, flush=True)
    except (OSError, ValueError):
        for descriptor in _spare_stderr:
            with contextlib.suppress(OSError):
                os.write(descriptor, f"memfit: {line}\n".encode())


def missing_from(folder: Path, outcome: Outcome) -> str | None:
    """What a launch that says it is done has not left on disk, in words; None: everything is there and agrees."""
    if outcome.windows is None:
        return "it does not say how many windows it trained"
    last = max((line["window"] for line in read_lines(folder / "metrics.jsonl").lines), default=-1)
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
