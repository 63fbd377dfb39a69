"""A script's failure as its author would see it: the script's own traceback, and a hint if one is known."""

from __future__ import annotations

import os
import re
import sys
import traceback
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from memfit.device.virtual.device_name import with_cuda
from memfit.errors import PADDED, InputError, describe, is_of_nested_tensors
from memfit.printable import one_line
from memfit.script.outcome import ScriptError

if TYPE_CHECKING:
    from memfit.script.tracer import ScriptTracer

_MEMFIT = f"{Path(__file__).parents[1]}{os.sep}"
_NO_RULE = re.compile(r"(?:Could not run|does not support|no fake impl|has no kernel|NYI:?)\D*?'?([a-z_]+(?:::|\.)\w+)")
_NO_SHAPES = re.compile(r"([a-z_]+::\w+): attempted to run this operator with Meta tensors")
"""In an error before the last one: torch then tries the operator on real tensors, and fails by another operator."""

_ONE_CARD = re.compile(r"(gpu|cuda|device)\w*\b.*\b(only|just) (has|have|found|\d)", re.IGNORECASE | re.DOTALL)
"""In the error of a script that asks for more cards than there are."""

_BACKENDS = re.compile(r" This could be because the operator doesn't exist[^\n]*\n\n(?:\w+: [^\n]*\n)+")
"""What torch says after ``Could not run 'aten::...'``: where each kernel of each backend was registered."""


def script_error(error: BaseException, tracer: ScriptTracer) -> ScriptError:
    """Returns the error without memfit's frames."""
    text, summary = with_cuda(_own_traceback(error)), with_cuda(describe(error))
    if isinstance(error, InputError):
        text = text.replace(f"{InputError.__module__}.InputError: ", "memfit: ")
        return ScriptError(text=text, summary=one_line(f"{error.seen}: {error.why}"), hint=one_line(error.write))
    if isinstance(error, torch.OutOfMemoryError):
        return ScriptError(text=text, summary=summary, out_of_memory=True)
    if isinstance(error, MemoryError):
        hint = "the script needs more of the host's memory than there is free; write --host-memory SIZE for more"
        return ScriptError(text=text, summary=summary or "MemoryError", hint=hint)
    missing = _missing_package(error)
    if missing:
        package = missing.partition(".")[0]
        hint = f"install {package}, or write --stub {missing} if the step's memory does not depend on it"
        return ScriptError(text=text, summary=summary, hint=hint)
    operator = _NO_SHAPES.search(str(error.__context__)) or _NO_RULE.search(str(error))
    if operator and isinstance(error, NotImplementedError | RuntimeError):
        where = _where(error, tracer)
        hint = f"memfit has no rule for the operator {operator[1]} (called at {where})"
        return ScriptError(text=text, summary=summary, hint=hint)
    if is_of_nested_tensors(error):
        return ScriptError(text=text, summary=summary, hint=f"{PADDED} (called at {_where(error, tracer)})")
    if isinstance(error, OSError) and "Read-only file system" in str(error):
        return ScriptError(text=text, summary=summary, hint="write --allow-write DIR for a folder that may be written")
    if _asks_the_network(error):
        hint = "the network is off in a trace; download what the script reads before (a model's config is enough)"
        return ScriptError(text=text, summary=summary, hint=hint)
    if _ONE_CARD.search(str(error)):
        hint = "a trace has one card for each rank: write --world N where the script starts N of them"
        return ScriptError(text=text, summary=summary, hint=hint)
    if isinstance(error, EOFError) and "reading a line" in str(error):
        hint = "a trace has no input; let the script take the answer from an argument"
        return ScriptError(text=text, summary=summary, hint=hint)
    if isinstance(error, FileNotFoundError) and error.filename:
        hint = "run it in the folder where the script finds that file, or put a small one of the same form there"
        return ScriptError(text=text, summary=summary, hint=hint)
    of_shapes = isinstance(error, ValueError | RuntimeError | IndexError)
    return ScriptError(text=text, summary=summary, hint=tracer.virtual.assumptions.latest if of_shapes else "")


def _missing_package(error: BaseException | None) -> str:
    while error is not None:
        if isinstance(error, ModuleNotFoundError) and error.name:
            return _part_not_there(error.name)
        error = error.__cause__ or error.__context__
    return ""


def _part_not_there(name: str) -> str:
    """Returns the outermost missing part of a dotted name that cannot be imported: a package, or one module of it."""
    parts = name.split(".")
    return next((p for p in (".".join(parts[:n]) for n in range(1, len(parts))) if p not in sys.modules), name)


def _asks_the_network(error: BaseException | None) -> bool:
    words = ("Network is unreachable", "Name or service not known", "Temporary failure in name resolution",
             "couldn't connect to", "offline mode", "LocalEntryNotFoundError")  # fmt: skip
    while error is not None:
        if any(word in f"{type(error).__name__} {error}" for word in words):
            return True
        error = error.__cause__ or error.__context__
    return False


def _where(error: BaseException, tracer: ScriptTracer) -> str:
    frames = [(frame.f_code.co_filename, line) for frame, line in traceback.walk_tb(error.__traceback__)]
    own = [(file, line) for file, line in frames if tracer.lines.is_own(file)]
    return "{}:{}".format(*(own[-1] if own else frames[-1]))


def _own_traceback(error: BaseException) -> str:
    seen: set[int] = set()
    cut = traceback.TracebackException.from_exception(error)
    stack: list[traceback.TracebackException | None] = [cut]
    while stack:
        part = stack.pop()
        if part is None or id(part) in seen:
            continue
        seen.add(id(part))
        kept = [frame for frame in part.stack if not _is_machinery(frame.filename)]
        part.stack = traceback.StackSummary.from_list(kept)
        stack += [part.__cause__, part.__context__]
    return _BACKENDS.sub("\n", "".join(cut.format()))


def _is_machinery(file: str) -> bool:
    return file.startswith((_MEMFIT, "<frozen runpy>")) or file.endswith(("torch/utils/_stats.py",))
