"""A micro-batch's shape that notes whether a job reads it."""

from __future__ import annotations

from typing import Any

from memfit.job import Shape

_PARTS = frozenset(("items", "length", "units", "__dict__"))


class WatchedShape(Shape):
    """A shape, and whether a part of it was read: also where it was compared, copied or written as text."""

    was_read: bool = False

    def __getattribute__(self, name: str) -> Any:
        if name in _PARTS:
            object.__setattr__(self, "was_read", True)
        return super().__getattribute__(name)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Shape) and (self.items, self.length) == (other.items, other.length)

    def __hash__(self) -> int:
        return hash(Shape(items=self.items, length=self.length))

    def __reduce__(self) -> tuple[Any, ...]:
        return _shape, (self.items, self.length)


def _shape(items: int, length: int | None) -> Shape:
    return Shape(items=items, length=length)
