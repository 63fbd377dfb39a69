"""Python's garbage collector around traces: what is collected and when decides when a traced storage is freed.

A trace collects garbage before it begins. Traversing the modules of torch and of a job's libraries would take most of
that time, so that objects which stay anyway are frozen (``gc.freeze``): collections skip them.
"""

from __future__ import annotations

import atexit
import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager

_is_kept = False
"""Whether frozen objects stay frozen between traces."""
_depth = 0
"""Traces that are open, one within another."""
_modules = 0
"""Modules that were imported when objects were last frozen; 0: none is frozen."""


@contextmanager
def frozen_within() -> Iterator[None]:
    """Context with the collector off, in which what a trace freezes stays so, and before a later trace what imports
    brought is frozen too; after it nothing is frozen.

    At the latest until the process ends: libraries that count their objects then (nanobind, which triton is built with)
    report those that were never collected as leaks.
    """
    global _is_kept, _modules
    was_kept, was_enabled = _is_kept, gc.isenabled()
    _keep_what_is_frozen()
    gc.disable()
    try:
        yield
    finally:
        if not was_kept:
            _is_kept, _modules = False, 0
            gc.unfreeze()
        if was_enabled:
            gc.enable()


@contextmanager
def collected_before() -> Iterator[None]:
    """Context that collects garbage first and has the collector off; within another one it freezes nothing.

    What an open trace has made is never frozen: a cycle of it may become garbage that the trace collects. Before the
    first trace there is no garbage of one, and objects that will stay are frozen unseen.
    """
    global _depth
    if _is_kept and not _modules:
        _freeze()
    gc.collect()
    was_enabled = gc.isenabled()
    gc.disable()
    freezes = _depth == 0 and (len(sys.modules) > _modules if _is_kept else not gc.get_freeze_count())
    if freezes:
        _freeze()
    _depth += 1
    try:
        yield
    finally:
        _depth -= 1
        if freezes and not _is_kept:
            gc.unfreeze()
        if was_enabled:
            gc.enable()


@contextmanager
def frozen_imports() -> Iterator[None]:
    """Context for the imports of a process that begins: the collector is off, and afterwards what they brought is
    frozen.

    Importing torch takes a fourth less time so, and a collection of the modules of torch takes a sixth of a second.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if was_enabled:
            gc.enable()


def freeze_loaded() -> None:
    """Collects garbage and freezes what is left: what a process holds before its work stays until it ends."""
    gc.collect()
    gc.freeze()


def _keep_what_is_frozen() -> None:
    global _is_kept
    if not _is_kept:
        atexit.register(gc.unfreeze)
    _is_kept = True


def _freeze() -> None:
    global _modules
    gc.freeze()
    _modules = len(sys.modules)
