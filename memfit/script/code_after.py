"""What a script does with its nets after the training: a trace that stops within the training does not reach it.

Only statements that follow the training's outermost loop count, in the function that has it and in its callers.
A statement does something with a net where a call names one, something that holds one, such as a trainer, or a function
of the user's own that uses one, and is no call that saves.
"""

from __future__ import annotations

import ast
import linecache
import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress
from functools import cache
from itertools import islice
from types import CodeType, FrameType, FunctionType
from typing import Any

from torch import nn

from memfit.frame_variables import frame_variables
from memfit.script.source_lines import SourceLines

_CALLERS = frozenset(
    {
        "absl", "click", "contextlib", "draccus", "fire", "hydra", "jsonargparse", "runpy", "typer", "tyro",
        "torch.utils._contextlib", "torch.distributed.elastic.multiprocessing.errors",
    }
)  # fmt: skip
"""Libraries, and modules of them, that call a script's own functions, whose callers go on after it."""
_RUNS = "memfit.script.run_script"
"""What runs the script: whoever calls it does not belong to that."""
_FORWARD = "torch.nn.modules.module"
"""What calls a net's forward."""
_SAVING = ("save", "unwrap", "export", "push", "log")
"""Beginnings of the names of calls that save a net."""
_LIGHT = frozenset(
    {
        "state_dict", "eval", "to", "cpu", "parameters", "named_parameters", "modules", "buffers", "children",
        "print", "len", "type", "id", "repr", "str", "isinstance", "getattr", "hasattr", "close", "finish", "wait",
        "info", "debug", "warning", "end_training", "free_memory", "clear", "barrier",
    }
)  # fmt: skip
"""Names of calls that need no more memory than the net that they are given."""
_GETS_STATE = re.compile(r"get_\w*state_dict")
_LOOPS = (ast.For, ast.AsyncFor, ast.While)
_TEXT = 60
"""Characters of a statement that are shown."""


def code_after(lines: SourceLines, is_past: bool = False) -> str:
    """Where the script goes on with its nets after the training that runs now, and its statement; empty: nowhere.

    Where the training is over, ``is_past``, the statement that runs now is the first of the rest.
    """
    frames = _frames_of_the_training(lines)
    for frame in frames:
        path = _path(frame.f_code, _place(frame))
        runs = path[-1:] if is_past and frame is frames[0] and isinstance(path[-1], ast.stmt) else []
        for statement in [*runs, *_following(path)]:
            if _uses_a_net(statement, frame.f_globals | frame_variables(frame), lines):
                text = " ".join(ast.unparse(statement).split("\n")[0].split())
                shown = text if len(text) <= _TEXT else text[: _TEXT - 3] + "..."
                return f"{frame.f_code.co_filename}:{statement.lineno}: {shown}"
    return ""


def _frames_of_the_training(lines: SourceLines) -> list[FrameType]:
    """The user's frames, the innermost first, from the one whose statement is the whole training."""
    frame: FrameType | None = sys._getframe(1)
    stack: list[FrameType] = []
    while frame is not None:
        stack.append(frame)
        frame = frame.f_back
    frames: list[FrameType] = []
    for each in reversed(stack):
        file, module = each.f_code.co_filename, each.f_globals.get("__name__") or ""
        if module == _RUNS:
            frames = []
        elif lines.is_own(file):
            frames.append(each)
            if any(isinstance(node, _LOOPS) for node in _path(each.f_code, _place(each))):
                break
        elif frames and (module == _FORWARD or not (lines.is_internal(file) or _calls_the_script(module))):
            break
    return frames[::-1]


def _calls_the_script(module: str) -> bool:
    return not {module, module.partition(".")[0]}.isdisjoint(_CALLERS)


def _place(frame: FrameType) -> tuple[int, int]:
    """Line and column of what a frame runs; -1 where the column is not known, as in Python 3.10."""
    positions = getattr(frame.f_code, "co_positions", None)
    if positions is None:
        return frame.f_lineno, -1
    line, _, column, _ = next(islice(positions(), frame.f_lasti // 2, None), (None, None, None, None))
    return line or frame.f_lineno, -1 if line is None or column is None else column


def _following(path: list[Any]) -> Iterator[ast.stmt]:
    """The statements of a function, or of a file, that run after those of a path and after the loops around them."""
    outermost = next((depth for depth, node in enumerate(path) if isinstance(node, _LOOPS)), len(path) - 1)
    for depth in range(outermost, 0, -1):
        block = next(
            (
                block
                for name in ("body", "orelse", "finalbody")
                if path[depth] in (block := getattr(path[depth - 1], name, []))
            ),
            [],
        )
        yield from block[block.index(path[depth]) + 1 :] if block else ()


@cache
def _path(code: CodeType, place: tuple[int, int]) -> list[Any]:
    """The function's node, or the file's, and the statements around a place, the outermost first."""
    try:
        tree = ast.parse("".join(linecache.getlines(code.co_filename)))
    except SyntaxError:
        return [ast.Module([], [])]
    node: Any = tree
    if code.co_name != "<module>":
        node = next((each for each in ast.walk(tree) if _begins_at(each, code)), None)
        if node is None:
            return [ast.Module([], [])]
    path = [node]
    while node is not None:
        inner = (child for child in ast.iter_child_nodes(node) if isinstance(child, ast.stmt | ast.ExceptHandler))
        node = next((child for child in inner if _holds(child, *place)), None)
        path += [node] if node is not None else []
    return path


def _holds(node: Any, line: int, column: int) -> bool:
    if column < 0:
        return bool(node.lineno <= line <= node.end_lineno)
    return (node.lineno, node.col_offset) <= (line, column) < (node.end_lineno, node.end_col_offset)


def _begins_at(node: ast.AST, code: CodeType) -> bool:
    if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) or node.name != code.co_name:
        return False
    return code.co_firstlineno in (node.lineno, *(decorator.lineno for decorator in node.decorator_list))


def _uses_a_net(statement: ast.stmt, names: Mapping[str, Any], lines: SourceLines) -> bool:
    if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return False
    for call in (node for node in ast.walk(statement) if isinstance(node, ast.Call)):
        called = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
        if called in _LIGHT or called.lstrip("_").startswith(_SAVING) or _GETS_STATE.fullmatch(called):
            continue
        if any(_has_a_net(names.get(name), lines, frozenset()) for name in _own_names(call)):
            return True
    return False


def _own_names(call: ast.Call) -> Iterator[str]:
    """Names that a call reads itself, rather than a call within its arguments."""
    waiting: list[ast.AST] = [call.func, *call.args, *(word.value for word in call.keywords)]
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.Name):
            yield node.id
        elif not isinstance(node, ast.Call):
            waiting += ast.iter_child_nodes(node)


def _has_a_net(value: Any, lines: SourceLines, seen: frozenset[CodeType]) -> bool:
    """Whether it is a net, holds one, or is a function of the user's own that reads one or makes one.

    A value is asked for its type, not for its class, which an object of the user's own may answer as it likes.
    """
    if issubclass(type(value), type):
        return issubclass(value, nn.Module)
    if type(value) is FunctionType:
        code = value.__code__
        if code in seen or not lines.is_own(code.co_filename):
            return False
        read = (value.__globals__.get(name) for name in code.co_names)
        return any(_has_a_net(each, lines, seen | {code}) for each in read)
    held: Any = None
    with suppress(Exception):
        held = value.__dict__
    of_values = held.values() if type(held) is dict else ()
    return any(issubclass(type(each), nn.Module) for each in (value, *of_values))
