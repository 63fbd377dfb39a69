"""What a process that was ended while it wrote a checkpoint leaves in the folder of checkpoints."""

from __future__ import annotations

import shutil
from pathlib import Path


def drop_unfinished(checkpoints: Path) -> None:
    """Drops it, where no process writes checkpoints any more."""
    for entry in checkpoints.glob(".*") if checkpoints.is_dir() else ():
        shutil.rmtree(entry, ignore_errors=True)
