"""Finds the comparisons of a result with the best one so far: those whose outcome replaces the best by the result.

Scripts write them in many forms: ``if score > best: best = score``, ``if score <= best: waited += 1`` with the
replacement under ``else``, and ``is_best = score > best; best = max(score, best)``.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass

_ORDERS = (ast.Lt, ast.Gt, ast.LtE, ast.GtE)
_LEAVES = (ast.Continue, ast.Break, ast.Return)
_PLACE = (ast.Name, ast.Attribute, ast.Subscript, ast.Constant, ast.expr_context)


@dataclass(frozen=True, kw_only=True)
class BestComparison:
    """A comparison of a result with the best one so far.

    Attributes:
        best: the expression that reads the best result.
        side: 0 where the result is on the left of the comparison, 1 where it is on the right.
        result: the expression that reads the result where it is a part of a side; None where it is that side.
        answer: the comparison's value where the result is better.
    """

    best: ast.expr
    side: int
    result: ast.expr | None
    answer: bool


@dataclass(frozen=True, kw_only=True)
class _Replacement:
    """An assignment ``target = value``; ``extreme`` is ``max`` or ``min`` where it takes the better one of both."""

    target: ast.expr
    value: ast.expr
    extreme: str = ""


def best_comparisons(tree: ast.AST) -> dict[ast.Compare, BestComparison]:
    """The comparisons of a module, by their node."""
    answers: dict[ast.Compare, BestComparison] = {}
    for node in ast.walk(tree):
        for name in ("body", "orelse", "finalbody"):
            block = getattr(node, name, None)
            if isinstance(block, list):
                for place, statement in enumerate(block):
                    answers |= _of_statement(statement, block[place + 1 :])
    return answers


def _of_statement(statement: ast.stmt, rest: list[ast.stmt]) -> dict[ast.Compare, BestComparison]:
    """The comparisons of one statement, before the others of its block."""
    answers: dict[ast.Compare, BestComparison] = {}
    for compared, holds in _comparisons(statement):
        for replacement, branch in _replacements(statement, rest):
            answer = holds if branch is None else holds is branch
            if comparison := _matched(compared, replacement, answer=answer, decides=branch is not None):
                answers.setdefault(compared, comparison)
    return answers


def _comparisons(statement: ast.stmt) -> Iterator[tuple[ast.Compare, bool]]:
    """(comparison, whether it holds where the whole condition does) of a statement's condition."""
    match statement:
        case ast.If():
            yield from _parts(statement.test, holds=True)
        case ast.Assign():
            yield from _parts(statement.value, holds=True)
            for part in ast.walk(statement.value):
                if isinstance(part, ast.IfExp):
                    yield from _parts(part.test, holds=True)


def _parts(node: ast.expr, *, holds: bool) -> Iterator[tuple[ast.Compare, bool]]:
    match node:
        case ast.BoolOp():
            for value in node.values:
                yield from _parts(value, holds=holds)
        case ast.UnaryOp(op=ast.Not()):
            yield from _parts(node.operand, holds=not holds)
        case ast.Compare(ops=[order]) if isinstance(order, _ORDERS):
            yield node, holds


def _replacements(statement: ast.stmt, rest: list[ast.stmt]) -> Iterator[tuple[_Replacement, bool | None]]:
    """(assignment, the condition's value with which it runs) of what a statement's condition decides; None where it
    runs with both, and takes the better one.
    """
    if isinstance(statement, ast.If):
        yield from ((each, True) for each in _assignments(statement.body))
        yield from ((each, False) for each in _assignments(statement.orelse))
        if isinstance(statement.body[-1], _LEAVES):
            yield from ((each, False) for each in _assignments(rest) if not each.extreme)
    elif isinstance(statement, ast.Assign):
        flags = {ast.unparse(target) for target in statement.targets}
        for later in rest:
            if isinstance(later, ast.If) and ast.unparse(later.test) in flags:
                yield from ((each, True) for each in _assignments(later.body))
    yield from ((each, None) for each in _assignments(rest) if each.extreme)


def _assignments(body: list[ast.stmt]) -> Iterator[_Replacement]:
    """The assignments among statements, those of ``a, b = c, d`` too."""
    for statement in body:
        if isinstance(statement, ast.Assign):
            for target in statement.targets:
                pairs = [(target, statement.value)]
                if isinstance(target, ast.Tuple) and isinstance(statement.value, ast.Tuple):
                    pairs = list(zip(target.elts, statement.value.elts, strict=False))
                yield from (_replacement(*pair) for pair in pairs if _is_place(pair[0]))


def _replacement(target: ast.expr, value: ast.expr) -> _Replacement:
    match value:
        case ast.Call(func=ast.Name("max" | "min" as extreme), args=[first, second], keywords=[]):
            if _same(first, target):
                return _Replacement(target=target, value=second, extreme=extreme)
            if _same(second, target):
                return _Replacement(target=target, value=first, extreme=extreme)
    return _Replacement(target=target, value=value)


def _matched(
    compared: ast.Compare, replaced: _Replacement, *, answer: bool, decides: bool
) -> BestComparison | None:  # fmt: skip
    """The comparison where it compares what an assignment replaces with what it is replaced by; else None.

    Args:
        answer: its value where the assignment runs.
        decides: whether the assignment runs with that value alone. Where it takes the better one of both, the order of
            the two tells the value.
    """
    sides = [compared.left, compared.comparators[0]]
    best = ast.parse(ast.unparse(replaced.target), mode="eval").body
    for side in (0, 1):
        given, other = sides[side], sides[1 - side]
        given = given.target if isinstance(given, ast.NamedExpr) else given
        if not _is_result(given, replaced.value) or _same(given, best) or not _contains(other, best):
            continue
        if not decides:
            is_larger = isinstance(compared.ops[0], ast.Gt | ast.GtE) == (side == 0)
            answer = is_larger == (replaced.extreme == "max")
        return BestComparison(best=best, side=side, result=None, answer=answer)
    is_part = decides and _is_place(replaced.value) and not _same(replaced.value, best)
    if is_part and _contains(compared, replaced.value) and _contains(compared, best):
        return BestComparison(
            best=best, side=0, result=ast.parse(ast.unparse(replaced.value), mode="eval").body, answer=answer
        )
    return None


def _is_result(side: ast.expr, value: ast.expr) -> bool:
    """Whether a side of a comparison is what an assignment takes, or a variable that its value is made of, as in
    ``value.item()``."""
    return not isinstance(side, ast.Constant) and (_same(side, value) or (_is_place(side) and _contains(value, side)))


def _is_place(node: ast.expr) -> bool:
    """Whether an expression is a variable, or an attribute or an element by a constant of one."""
    return not isinstance(node, ast.Constant) and all(isinstance(part, _PLACE) for part in ast.walk(node))


def _contains(node: ast.expr, wanted: ast.expr) -> bool:
    return any(isinstance(part, ast.expr) and _same(part, wanted) for part in ast.walk(node))


def _same(node: ast.expr, other: ast.expr) -> bool:
    return ast.unparse(node) == ast.unparse(other)
