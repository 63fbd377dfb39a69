"""What memfit measured on this machine and keeps, in the user's cache folder: each file is written whole or not."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any


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
    """Writes an object beside its place in the cache and renames it there.

    Raises:
        OSError: the cache folder cannot be written.
    """
    path = cache_folder() / name
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        beside.write_text(json.dumps(value))
        beside.replace(path)
    finally:
        beside.unlink(missing_ok=True)
    return path
