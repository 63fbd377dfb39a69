"""Which parameters a Triton kernel may write to, read from the source of its function.

A pointer reaches a store by assignments, sums and block pointers, or as an argument of another kernel function. What a
load gives is a value, and carries no pointer on.
"""

from __future__ import annotations

import ast
import builtins
import inspect
import textwrap
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from typing import Any

_VALUES = ("load", "atomic_", "descriptor_load", "zeros", "arange", "program_id")
"""Parts of the names of calls that give values, and no pointer."""
_WRITES = ("store", "atomic_", "inline_asm", "scatter", "copy", "reduce_add")
"""Parts of the names of calls that write through a pointer."""


@cache
def written_parameters(function: Callable[..., Any]) -> frozenset[str]:
    """Names of the parameters that a kernel's function may write to; all of them where its source is not known."""
    names = tuple(inspect.signature(function).parameters)
    try:
        (definition,) = ast.parse(textwrap.dedent(inspect.getsource(function))).body
    except (OSError, TypeError, SyntaxError, ValueError):
        return frozenset(names)
    pointers = {name: frozenset({name}) for name in names}
    while (grown := _assigned(definition, pointers)) != pointers:
        pointers = grown
    scope = {**vars(builtins), **getattr(function, "__globals__", {}), **inspect.getclosurevars(function).nonlocals}
    return frozenset().union(
        *(_written(call, pointers, scope, function) for call in ast.walk(definition) if isinstance(call, ast.Call))
    )


Pointers = Mapping[str, frozenset[str]]
"""Names of a kernel's variables to the parameters that they may point into."""


def _assigned(definition: ast.AST, pointers: Pointers) -> dict[str, frozenset[str]]:
    """The variables after each assignment of the function was followed once more."""
    grown = dict(pointers)
    for target, value in _assignments(definition):
        parts = _pointed(value, grown)
        for name in ast.walk(target):
            if isinstance(name, ast.Name):
                grown[name.id] = grown.get(name.id, frozenset()) | parts
    return grown


def _assignments(definition: ast.AST) -> Iterator[tuple[ast.AST, ast.AST]]:
    for node in ast.walk(definition):
        if isinstance(node, ast.Assign):
            yield from ((target, node.value) for target in node.targets)
        elif isinstance(node, ast.AugAssign | ast.NamedExpr) or (isinstance(node, ast.AnnAssign) and node.value):
            yield node.target, node.value  # type: ignore[misc]
        elif isinstance(node, ast.For):
            yield node.target, node.iter


def _pointed(expression: ast.AST, pointers: Pointers) -> frozenset[str]:
    """The parameters that an expression may point into."""
    if isinstance(expression, ast.Name):
        return pointers.get(expression.id, frozenset())
    if isinstance(expression, ast.Call) and any(part in _name(expression.func) for part in _VALUES):
        return frozenset()
    return frozenset().union(*(_pointed(child, pointers) for child in ast.iter_child_nodes(expression)))


def _name(called: ast.AST) -> str:
    return called.attr if isinstance(called, ast.Attribute) else getattr(called, "id", "")


def _written(
    call: ast.Call, pointers: Pointers, scope: Mapping[str, Any], caller: Callable[..., Any]
) -> frozenset[str]:
    """The parameters that a call may write to."""
    arguments = [argument.value if isinstance(argument, ast.Starred) else argument for argument in call.args]
    every = frozenset().union(*(_pointed(value, pointers) for value in (*arguments, *(k.value for k in call.keywords))))
    if any(part in _name(call.func) for part in _WRITES):
        return every | _pointed(call.func, pointers)
    if not every:
        return every
    kernel = getattr(_resolved(call.func, scope), "fn", None)
    if not inspect.isfunction(kernel) or kernel is caller:
        return frozenset() if isinstance(call.func, ast.Attribute) or _name(call.func) in scope else every
    if len(arguments) != len(call.args) or any(isinstance(argument, ast.Starred) for argument in call.args):
        return every
    names = tuple(inspect.signature(kernel).parameters)
    given = [*zip(names, arguments, strict=False), *((keyword.arg, keyword.value) for keyword in call.keywords)]
    written = written_parameters(kernel)
    return frozenset().union(*(_pointed(value, pointers) for name, value in given if name in written))


def _resolved(called: ast.AST, scope: Mapping[str, Any]) -> Any:
    """What a call's function is, by the names of the kernel's module; None where it is a variable's."""
    if isinstance(called, ast.Name):
        return scope.get(called.id)
    if isinstance(called, ast.Attribute):
        return getattr(_resolved(called.value, scope), called.attr, None)
    return None
