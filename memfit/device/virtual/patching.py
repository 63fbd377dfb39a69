"""Attributes replaced for a while, and put back exactly as they were."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

_ABSENT = object()


@contextmanager
def replaced(owner: Any, **attributes: Any) -> Iterator[None]:
    """Sets attributes of ``owner``; on leaving, each is again the very object it was, or absent.

    Whoever watches what is read of ``owner`` does not see it.
    """
    own = object.__getattribute__(owner, "__dict__")
    before = {name: own.get(name, _ABSENT) for name in attributes}
    for name, value in attributes.items():
        setattr(owner, name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is _ABSENT:
                delattr(owner, name)
            else:
                setattr(owner, name, value)


@contextmanager
def appended(items: list[Any], item: Any) -> Iterator[None]:
    """Appends ``item`` to a list of someone else's; on leaving, that one is gone, whatever else was appended since."""
    items.append(item)
    try:
        yield
    finally:
        last = len(items) - 1 - items[::-1].index(item) if item in items else None
        if last is not None:
            del items[last]
