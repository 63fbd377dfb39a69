"""What is audited: ``path/file.py:function``, run anew for every rank as a fresh process would run it."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from memfit.errors import InputError, describe
from memfit.loading import module_of_file

HOW = "write path/file.py:function, called as function(rank, world) or as loop(rank, world, observe)"


def load_target(target: str) -> Callable[..., Any]:
    """The function of ``path/file.py:function``, from a fresh run of the file.

    Raises:
        InputError: no such file or function, or a file that fails when it is run.
    """
    path, colon, name = target.rpartition(":")
    if not colon or not name.isidentifier() or not path.endswith(".py"):
        raise InputError(f"target {target!r}", "not a file and a function", HOW)
    file = Path(path)
    if not file.is_file():
        raise InputError(f"target {target!r}", f"no file {path}", HOW)
    function = getattr(_run(file.resolve(), target), name, None)
    if not callable(function):
        raise InputError(f"target {target!r}", f"{path} has no function {name!r}", HOW)
    is_loop(function)
    checked: Callable[..., Any] = function
    return checked


def is_loop(function: Callable[..., Any]) -> bool:
    """Whether it takes (rank, world, observe), and not (rank, world).

    Raises:
        InputError: it can be called with neither.
    """
    name = getattr(function, "__name__", repr(function))
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return False
    placed = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    needed = sum(p.default is p.empty for p in placed)
    named = len(placed) >= 3 and (placed[2].name == "observe" or name == "loop")
    if named or needed == 3:
        return True
    rest = any(p.kind is p.VAR_POSITIONAL for p in parameters)
    if needed > 2 or (len(placed) < 2 and not rest):
        seen = ", ".join(p.name for p in placed)
        raise InputError(f"function {name}({seen})", "it cannot be called with a rank and a world size", HOW)
    return False


def _run(file: Path, target: str) -> ModuleType:
    module, run = module_of_file(file, f"memfit_target_{file.stem}")
    try:
        run()
    except InputError:
        raise
    except BaseException as error:
        raise InputError(
            f"target {target!r}", f"running its file raises {describe(error)}", "make the file importable"
        ) from error
    return module
