"""A Python file as the rules see it: parents of every node, scopes, training loops, and what names stand for."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import decode_source
from pathlib import Path

from memfit.errors import InputError, why_unreadable

Scope = ast.Module | ast.FunctionDef | ast.AsyncFunctionDef
Loop = ast.For | ast.While | ast.AsyncFor
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
LOOPS = (ast.For, ast.While, ast.AsyncFor)


@dataclass(frozen=True, kw_only=True)
class Finding:
    """A mistake at a line: what it is, why it is one, and what to write."""

    file: str
    line: int
    code: str
    what: str
    why: str
    cure: str


class Source:
    """A parsed file.

    Raises:
        InputError: it cannot be read, or is no Python.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            text = decode_source(path.read_bytes())
            self.tree = ast.parse(text, str(path))
        except OSError as error:
            raise InputError(
                str(path), f"cannot be read: {why_unreadable(error)}", "write a Python file or folder"
            ) from error
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
            where = f"{path}:{error.lineno}" if isinstance(error, SyntaxError) and error.lineno else str(path)
            raise InputError(where, f"no Python 3 ({_why(error)})", "write a Python file that runs") from None
        self.lines = text.splitlines()
        self.parents: dict[ast.AST, ast.AST] = {}
        self.nodes: list[ast.AST] = []
        pending: list[ast.AST] = [self.tree]
        while pending:
            node = pending.pop()
            self.nodes.append(node)
            for child in ast.iter_child_nodes(node):
                self.parents[child] = node
                pending.append(child)
        self.calls = [node for node in self.nodes if isinstance(node, ast.Call)]
        self.backward_calls = [(call, backward_losses(call)) for call in self.calls if _is_backward(call)]

    def above(self, node: ast.AST) -> Iterator[ast.AST]:
        """The nodes that hold this one, the innermost first."""
        while node in self.parents:
            node = self.parents[node]
            yield node

    def scope(self, node: ast.AST) -> Scope:
        """The function that holds a node, or the module."""
        return next((part for part in self.above(node) if isinstance(part, FUNCTIONS)), self.tree)

    def loops(self, node: ast.AST) -> list[Loop]:
        """The loops around a node within its function, the innermost first."""
        loops: list[Loop] = []
        for part in self.above(node):
            if isinstance(part, (*FUNCTIONS, ast.ClassDef)):
                break
            if isinstance(part, LOOPS):
                loops.append(part)
        return loops

    def holds(self, outer: ast.AST, inner: ast.AST) -> bool:
        """Whether a node holds another."""
        return outer is inner or any(part is outer for part in self.above(inner))

    def training_loops(self) -> list[Loop]:
        """The innermost loop around each backward."""
        innermost = [loops[0] for call, _ in self.backward_calls if (loops := self.loops(call))]
        return list(dict.fromkeys(innermost))

    def is_step(self, scope: Scope) -> bool:
        """Whether a function runs one training step: a backward outside of loops, and a loop of the file calls it."""
        if isinstance(scope, ast.Module) or not any(
            self.scope(call) is scope and not self.loops(call) for call, _ in self.backward_calls
        ):
            return False
        return any(called(call) == scope.name and self.loops(call) for call in self.calls)

    def trained_losses(self, scope: Scope) -> set[str]:
        """Names on which a backward runs in this scope."""
        return {name for call, names in self.backward_calls if self.scope(call) is scope for name in names}

    def finding(self, node: ast.AST, code: str, what: str, why: str, cure: str) -> Finding:
        """A finding at a node."""
        line = getattr(node, "lineno", 1)
        return Finding(file=str(self.path), line=line, code=code, what=what, why=why, cure=cure)

    def is_ignored(self, finding: Finding) -> bool:
        """Whether the line ends in ``# memfit: ignore``."""
        text = self.lines[finding.line - 1] if finding.line <= len(self.lines) else ""
        return "# memfit: ignore" in text


def dotted(node: ast.AST) -> str:
    """``torch.cuda.empty_cache`` of an expression of names; empty for another."""
    parts = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    if not isinstance(node, ast.Name):
        return ".".join(["?", *reversed(parts)]) if parts else ""
    return ".".join([node.id, *reversed(parts)])


def called(call: ast.Call) -> str:
    """The last name of what is called."""
    return dotted(call.func).rpartition(".")[2]


def keyword(call: ast.Call, name: str) -> ast.expr | None:
    """The value of a keyword argument."""
    return next((each.value for each in call.keywords if each.arg == name), None)


def is_constant(node: ast.AST | None, value: object) -> bool:
    """Whether an expression is this constant."""
    return isinstance(node, ast.Constant) and node.value is value


def names_in(node: ast.AST) -> set[str]:
    """Every dotted name that is read or written inside."""
    return {dotted(part) for part in ast.walk(node) if isinstance(part, ast.Name | ast.Attribute)} - {""}


def target_names(node: ast.stmt) -> list[str]:
    """The names that a statement assigns."""
    if isinstance(node, ast.Assign):
        targets: list[ast.expr] = list(node.targets)
    elif isinstance(node, ast.AnnAssign | ast.AugAssign):
        targets = [node.target]
    else:
        return []
    flat = [part for target in targets for part in (target.elts if isinstance(target, ast.Tuple) else [target])]
    return [dotted(part) for part in flat]


def _is_backward(call: ast.Call) -> bool:
    name = dotted(call.func)
    return name.endswith((".backward", ".manual_backward")) and not name.endswith("autograd.backward")


def backward_losses(call: ast.Call) -> set[str]:
    """The losses of ``loss.backward()``, ``scaler.scale(loss).backward()`` or ``accelerator.backward(loss)``."""
    values: list[ast.AST] = [call.args[0]] if call.args else []
    if isinstance(call.func, ast.Attribute):
        values.append(call.func.value)
    names: set[str] = set()
    for value in values:
        if isinstance(value, ast.Name):
            names.add(value.id)
        else:
            names |= {part.id for part in ast.walk(value) if isinstance(part, ast.Name)}
    return names


def _why(error: Exception) -> str:
    if isinstance(error, UnicodeDecodeError):
        return "it is not UTF-8, and no comment in its first two lines names another encoding"
    return error.msg if isinstance(error, SyntaxError) else "too deep to be parsed"
