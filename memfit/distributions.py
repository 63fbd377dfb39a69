"""Which distributions a module comes from, looked up when somebody first asks.

``importlib.metadata.packages_distributions`` reads the files of every distribution that is installed: 0.13 s where 150
are. Diffusers calls it when it is imported, and asks it of packages that few have.
"""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property


class DistributionsWhenAsked(Mapping[str, list[str]]):
    """What ``packages_distributions`` returns, called when it is first needed.

    Args:
        look_up: that function.
    """

    def __init__(self, look_up: Callable[[], Mapping[str, list[str]]]) -> None:
        self._look_up = look_up

    @cached_property
    def _mapping(self) -> Mapping[str, list[str]]:
        return self._look_up()

    def __getitem__(self, module: str) -> list[str]:
        return self._mapping[module]

    def __iter__(self) -> Iterator[str]:
        return iter(self._mapping)

    def __len__(self) -> int:
        return len(self._mapping)


@contextmanager
def distributions_when_asked() -> Iterator[None]:
    """Context in which a library that calls ``packages_distributions`` gets a mapping that is made when it is used."""
    look_up = importlib.metadata.packages_distributions
    importlib.metadata.packages_distributions = lambda: DistributionsWhenAsked(look_up)
    try:
        yield
    finally:
        importlib.metadata.packages_distributions = look_up
