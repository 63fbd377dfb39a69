"""The user's folders, and what memfit measured on this machine and keeps in the cache: each file is written whole or
not.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from memfit.atomic_file import write_atomic


def cache_folder() -> Path:
    """``$XDG_CACHE_HOME/memfit``, by default ``~/.cache/memfit``; it need not exist."""
    return user_folder("XDG_CACHE_HOME", ".cache")


def user_folder(variable: str, default: str) -> Path:
    """memfit's folder within one that the XDG Base Directory specification names; a relative path is ignored, as the
    specification says.

    Args:
        variable: of the environment, such as ``XDG_CACHE_HOME``.
        default: the folder in the user's home where the variable is empty or not set.
    """
    folder = os.environ.get(variable, "")
    return Path(folder if os.path.isabs(folder) else os.path.join(os.path.expanduser("~"), default)) / "memfit"


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
