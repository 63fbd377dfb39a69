"""Conditions such as ``if score > best: best = score``: a trace takes each result for better than the one before it.

A trace has no data, so that all results of a validation are the same number, and only the first one would be the best.
In a real run results improve, and what a script does then, such as a copy of the weights beside the last one, needs
memory.
"""

from __future__ import annotations

import ast
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from numbers import Integral, Real
from typing import Any

from memfit.script.intervals import EarlyCondition

_ORDERS = (ast.Lt, ast.Gt)


@dataclass(kw_only=True)
class BestResults:
    """Answers the conditions. ``allows`` asks for a place whether one may hold that does not by itself; ``validated``
    tells whether a validation has run since the last step.
    """

    allows: Callable[[str], bool] = lambda where: True
    validated: Callable[[], bool] = lambda: True
    improved: list[EarlyCondition] = field(default_factory=list)

    def improves(self, holds: Any, result: Any, best: Any, where: str, text: str) -> Any:
        """The condition's value ``holds``, or True where ``result`` is the same number as ``best``."""
        same = _is_number(result) and _is_number(best) and result == best and math.isfinite(result)
        if same and isinstance(result, Integral) and not self.validated():
            same = False  # such as the most rows of a batch, for which a script keeps a buffer
        if not same or holds or not self.allows(where):
            return holds
        condition = EarlyCondition(where=where, text=text, answer=True)
        if condition not in self.improved:
            self.improved.append(condition)
        return True


def _is_number(number: Any) -> bool:
    """Whether it is a number, of Python or NumPy, and no truth value."""
    return isinstance(number, Real) and not isinstance(number, bool)


def best_of(compared: ast.Compare, body: list[ast.stmt]) -> tuple[ast.expr, ast.expr] | None:
    """(result, best so far) of a comparison of them, after which the statements of ``body`` set the best to the result;
    None for other comparisons.
    """
    if len(compared.ops) != 1 or not isinstance(compared.ops[0], _ORDERS):
        return None
    sides = (compared.left, compared.comparators[0])
    for target, value in _assignments(body):
        for result, other in (sides, sides[::-1]):
            if _same(result, value) and any(_same(part, target) for part in ast.walk(other)):
                return value, _loaded(target)
    return None


def _assignments(body: list[ast.stmt]) -> list[tuple[ast.expr, ast.expr]]:
    """(target, value) of the assignments among statements, those of ``a, b = c, d`` too."""
    pairs: list[tuple[ast.expr, ast.expr]] = []
    for statement in body:
        if isinstance(statement, ast.Assign):
            for target in statement.targets:
                both = (target, statement.value)
                if all(isinstance(side, ast.Tuple) for side in both):
                    pairs += zip(*(side.elts for side in both if isinstance(side, ast.Tuple)), strict=False)
                else:
                    pairs.append(both)
    return [(target, value) for target, value in pairs if _is_place(target) and _is_place(value)]


def _is_place(node: ast.expr) -> bool:
    """Whether an expression is a variable, or an attribute or an element by a constant of one."""
    kinds = (ast.Name, ast.Attribute, ast.Subscript, ast.Constant, ast.expr_context)
    return not isinstance(node, ast.Constant) and all(isinstance(part, kinds) for part in ast.walk(node))


def _same(one_side: ast.AST, other: ast.expr) -> bool:
    return isinstance(one_side, ast.expr) and ast.unparse(one_side) == ast.unparse(other)


def _loaded(target: ast.expr) -> ast.expr:
    """The expression that reads what an assignment writes."""
    return ast.parse(ast.unparse(target), mode="eval").body
