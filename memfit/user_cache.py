"""What memfit measured on this machine and keeps, in the user's cache folder: each file is written whole or not."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from memfit.atomic_file import write_atomic


def cache_folder() -> Path:
    """``$XDG_CACHE_HOME/memfit``, by default ``~/.cache/memfit``; it need not exist."""
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return Path(cache) / "memfit"


def read_kept(name: str) -> dict[str, Any]:
    """The object in a file of the cache; empty where there is none, or a torn one."""
    try:
        found = json.loads((cache_folder() / name).read_text())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def keep(name: str, value: dict[str, Any]) -> Path:
    """Writes an object into a file of the cache, whole or not at all.

    Raises:
        OSError: the cache folder cannot be written.
    """
    path = cache_folder() / name
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(path, json.dumps(value))
    return path
