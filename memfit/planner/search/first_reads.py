"""Where a job first reads what another one, made from other settings, has otherwise."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from inspect import getattr_static
from typing import Any

from memfit.job import Job

_ABSENT = object()
_BY_VALUE = (bool, int, float, str, type(None))


@contextmanager
def watched_first_reads(job: Job, others: Mapping[str, Job], on_read: Callable[[str], bool]) -> Iterator[None]:
    """Context in which a job is asked after what the others have otherwise.

    Where it is first asked for an attribute that differs in another one, or for all its attributes, ``on_read`` is
    called with the other's name. Where that returns True, the job becomes the other one, and is watched no more;
    what was set in the context stays as it was set.

    A job of a class that cannot be watched is not.

    Args:
        others: of the same class, by name.
    """
    own = object.__getattribute__(job, "__dict__")
    before = dict(own)
    unread = {name: _differing(type(job), before, vars(other)) for name, other in others.items()}
    is_watched = [True]

    def see(attribute: str) -> None:
        if not is_watched[0]:
            return
        for name in [name for name, differing in unread.items() if attribute in differing]:
            del unread[name]
            if on_read(name):
                is_watched[0] = False
                written = {key: value for key, value in own.items() if before.get(key, _ABSENT) is not value}
                deleted = before.keys() - own.keys()
                own.clear()
                own.update({key: value for key, value in vars(others[name]).items() if key not in deleted} | written)
                return

    kind = type(job)
    try:
        object.__setattr__(job, "__class__", _watched(kind, lambda read, name: see(name) if read is job else None))
    except Exception:  # its metaclass or its layout do not allow it
        yield
        return
    try:
        yield
    finally:
        is_watched[0] = False
        object.__setattr__(job, "__class__", kind)


def _watched(kind: type[Job], see: Callable[[object, str], None]) -> type[Job]:
    """A class that looks like ``kind``, of whose objects ``see`` is told what is read."""

    class Watched(kind):  # type: ignore[valid-type, misc]
        def __getattribute__(self, name: str) -> Any:
            see(self, name)
            return super().__getattribute__(name)

    Watched.__name__, Watched.__qualname__, Watched.__module__ = kind.__name__, kind.__qualname__, kind.__module__
    return Watched


def _differing(kind: type, mine: Mapping[str, Any], theirs: Mapping[str, Any]) -> frozenset[str]:
    """The attributes that are not the same, and ``__dict__``, which holds them.

    Args:
        kind: the class, which has what one of them lacks.
    """
    names = set()
    for name in mine.keys() | theirs.keys():
        default = getattr_static(kind, name, _ABSENT)
        if not _is_same(mine.get(name, default), theirs.get(name, default)):
            names.add(name)
    return frozenset({*names, "__dict__"})


def _is_same(mine: object, theirs: object) -> bool:
    return mine is theirs or (type(mine) is type(theirs) and isinstance(mine, _BY_VALUE) and mine == theirs)
