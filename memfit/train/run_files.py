"""Checks the files and folders of a run that is resumed, before anything in it changes."""

from __future__ import annotations

import os
from pathlib import Path

from memfit.errors import InputError

FILES = {
    "plan.toml": os.R_OK,
    "window_range.json": os.F_OK,
    "metrics.jsonl": os.R_OK | os.W_OK,
    "samples.jsonl": os.R_OK | os.W_OK,
}
"""The access that each must grant: a file that is only replaced may be read-only."""
FOLDERS = ("checkpoints", "final")


def check_run_files(run: Path) -> None:
    """Checks that what a resumed run reads and writes is of its kind, and is readable and writable.

    The final weights are written after the last window: without this check, a file in their place shows only then.

    Raises:
        InputError: a path that is to be a file is a folder, or the reverse, or it cannot be read or written.
    """
    for name, access in FILES.items():
        check_run_file(run / name, access)
    for name in FOLDERS:
        _check_folder(run / name)
    for weights in (run / "final").glob("*.safetensors"):
        check_run_file(weights, os.F_OK)


def check_run_file(path: Path, access: int = os.R_OK) -> None:
    """Checks that a path is no folder, and that a file there grants an access; nothing need be there.

    Args:
        access: of ``os.access``.

    Raises:
        InputError: it is a folder, or does not grant the access.
    """
    if path.is_dir():
        raise InputError(f"{path}", "it is a folder, and a run has a file there", "move it to another place")
    if path.is_file() and not os.access(path, access):
        raise _denied(path, "written" if os.access(path, os.R_OK) else "read")


def _check_folder(path: Path) -> None:
    if os.path.lexists(path) and not path.is_dir():
        raise InputError(f"{path}", "it is no folder, and a run has a folder there", "move it to another place")
    if path.is_dir() and not os.access(path, os.R_OK | os.W_OK | os.X_OK):
        raise _denied(path, "written" if os.access(path, os.R_OK) else "read")


def _denied(path: Path, access: str) -> InputError:
    return InputError(f"{path}", f"it cannot be {access}", f"change its permissions (chmod u+rwX {path})")
