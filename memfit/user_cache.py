"""What memfit measured on this machine and keeps, in the user's cache folder: each file is written whole or not."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from memfit.atomic_file import write_atomic


def cache_folder() -> Path:
    """``$XDG_CACHE_HOME/memfit``, by default ``~/.cache/memfit``; it need not exist."""
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return Path(cache) / "memfit"


def read_kept(name: str, valid: Callable[[Any], bool] = lambda value: True) -> dict[str, Any]:
    """The object in a file of the cache, without entries that are not valid; empty where there is none, or a torn one.

    Args:
        valid: whether a value is of the kind that is kept there. What is dropped is measured again.
    """
    try:
        content = json.loads((cache_folder() / name).read_text())
    except (OSError, ValueError, RecursionError):
        return {}
    return {key: value for key, value in content.items() if valid(value)} if isinstance(content, dict) else {}


def is_amount(value: Any) -> bool:
    """Whether a value is a finite number from 0."""
    return type(value) in (int, float) and 0 <= value < float("inf")


def is_count(value: Any) -> bool:
    """Whether a value is a whole number from 0 that 8 bytes hold."""
    return type(value) is int and 0 <= value < 2**63


def keep(name: str, value: dict[str, Any]) -> Path:
    """Writes an object into a file of the cache, whole or not at all.

    Raises:
        OSError: the cache folder cannot be written.
    """
    path = cache_folder() / name
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(path, json.dumps(value))
    return path
