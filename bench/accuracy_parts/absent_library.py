"""A compiled library that is not there: its functions write into tensors that they are given, and allocate none."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class AbsentLibrary:
    """Each of its functions does nothing."""

    def __getattr__(self, name: str) -> Callable[..., None]:
        if name.startswith("__"):
            raise AttributeError(name)
        return nothing


def nothing(*args: Any, **kwargs: Any) -> None:
    """A function that only writes into what it is given."""
