"""Compiles the script, and the training loops of libraries, so that conditions on counters and on the best result, and
loops, ask a trace.
"""

from __future__ import annotations

import ast
import builtins
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.machinery import SourceFileLoader
from types import CodeType
from typing import Any

from memfit.device.virtual.patching import replaced
from memfit.script.best_comparisons import BestComparison, best_comparisons

_REMAINDER, _TURNS, _WHILE = "__memfit_remainder__", "__memfit_turns__", "__memfit_while__"
_IMPROVES = "__memfit_improves__"
_LOOPS = re.compile(r"train|loop|callback|checkpoint")
"""Names of the modules of libraries in which a training loop decides."""
_USE_UP = frozenset({"all", "any", "dict", "list", "max", "min", "set", "sorted", "sum", "tuple"})
"""Names of functions that ask a generator for all of its elements before anything else runs."""
_SIMPLE = (ast.Constant, ast.Name, ast.Attribute, ast.BinOp, ast.operator, ast.expr_context)


@contextmanager
def code_rewritten(
    is_own: Callable[[str], bool],
    remainder: Callable[..., Any],
    turns: Callable[..., Any],
    goes_on: Callable[..., Any],
    improves: Callable[..., Any],
) -> Iterator[None]:
    """Context in which modules are compiled by ``compiled``: those of the user, and training loops of libraries.

    Args:
        is_own: tells the files of the user.
        remainder: called as ``remainder(value, divisor, wanted, where, text, holds)`` in place of ``value % divisor``.
        turns: called as ``turns(iterable, where, yields, collects)``; its result is iterated in place of the iterable.
            ``yields`` tells whether a ``yield`` may leave the loop's body, and ``collects`` whether the loop is a
            comprehension, or a ``map``, which keeps what each of its turns makes.
        goes_on: called as ``goes_on(where)`` before a ``while`` loop; its result is asked before each turn.
        improves: called in place of a comparison of a result with the best one so far, as ``BestResults.improves``.
    """
    plain = SourceFileLoader.get_code

    def get_code(loader: SourceFileLoader, name: str) -> Any:
        path = loader.get_filename(name)
        if is_own(path) or _LOOPS.search(name.rpartition(".")[2]):
            return compiled(loader.get_data(path), path)
        return plain(loader, name)

    functions = {_REMAINDER: remainder, _TURNS: turns, _WHILE: goes_on, _IMPROVES: improves}
    with replaced(builtins, **functions), replaced(SourceFileLoader, get_code=get_code):
        yield


def compiled(source: bytes, path: str) -> CodeType:
    """The code of a file, rewritten. Lines stay where they are.

    Raises:
        SyntaxError: as Python itself does.
    """
    tree = ast.parse(source, path)
    tree = _Rewriter(path, best_comparisons(tree)).visit(tree)
    return compile(ast.fix_missing_locations(tree), path, "exec", dont_inherit=True)


class _Rewriter(ast.NodeTransformer):
    """Asks for remainders in ``a % b == c``, ``a % b != c`` and conditions ``a % b``, and for the turns of loops."""

    def __init__(self, path: str, bests: dict[ast.Compare, BestComparison]) -> None:
        self._path = path
        self._bests = bests

    def visit_Compare(self, node: ast.Compare) -> ast.AST:
        text = ast.unparse(node)
        self.generic_visit(node)
        wanted = node.comparators[0]
        if len(node.ops) == 1 and isinstance(node.ops[0], ast.Eq | ast.NotEq) and _is_simple(wanted):
            node.left = self._asked(node.left, wanted, text, holds=isinstance(node.ops[0], ast.Eq))
        return self._improves(node, best, text) if (best := self._bests.get(node)) else node

    def visit_If(self, node: ast.If) -> ast.AST:
        node.test = self._truth(node.test)
        return self.generic_visit(node)

    def visit_IfExp(self, node: ast.IfExp) -> ast.AST:
        node.test = self._truth(node.test)
        return self.generic_visit(node)

    def visit_While(self, node: ast.While) -> Any:
        """Its own condition stays: ``while n % 8 != 0`` looks for a number."""
        yields = _yields(node.body)
        test, node.test = node.test, ast.Constant(True)
        self.generic_visit(node)
        node.test = test
        if yields:
            return node
        name = f"_memfit_loop_{node.lineno}"
        asked = ast.Call(ast.Name(name, ast.Load()), [], [])
        node.test = ast.copy_location(ast.BoolOp(ast.And(), [test, asked]), test)
        made = ast.Call(ast.Name(_WHILE, ast.Load()), [ast.Constant(f"{self._path}:{node.lineno}")], [])
        before, after = (ast.Assign([ast.Name(name, ast.Store())], value) for value in (made, ast.Constant(None)))
        return [ast.copy_location(before, node), node, ast.copy_location(after, node)]

    def visit_For(self, node: ast.For) -> ast.AST:
        yields = _yields(node.body)
        self._use_up(node.iter)
        self.generic_visit(node)
        node.iter = self._turns(node.iter, yields=yields)
        return node

    def visit_ListComp(self, node: ast.ListComp) -> ast.AST:
        return self.generic_visit(self._collect(node))

    def visit_SetComp(self, node: ast.SetComp) -> ast.AST:
        return self.generic_visit(self._collect(node))

    def visit_DictComp(self, node: ast.DictComp) -> ast.AST:
        return self.generic_visit(self._collect(node))

    def visit_Call(self, node: ast.Call) -> ast.AST:
        if node.args and isinstance(node.func, ast.Name) and node.func.id in _USE_UP:
            self._use_up(node.args[0])
        return self.generic_visit(node)

    def _use_up(self, node: ast.expr) -> None:
        """Rewrites a generator, or a ``map``, all of whose elements are asked for at once."""
        match node:
            case ast.GeneratorExp():
                self._collect(node)
            case ast.Call(func=ast.Name("map"), args=[_, iterable, *_]):
                node.args[1] = self._turns(iterable, yields=False, collects=True)

    def _collect(self, node: Any) -> Any:
        """A comprehension that calls something, with its iterables rewritten."""
        if any(isinstance(part, ast.Call) for part in ast.walk(getattr(node, "elt", None) or node.value)):
            for generator in node.generators:
                generator.iter = self._turns(generator.iter, yields=bool(generator.is_async), collects=True)
        return node

    def _turns(self, iterable: ast.expr, *, yields: bool, collects: bool = False) -> ast.expr:
        """The call that takes the place of what is iterated."""
        given = [ast.Constant(value) for value in (f"{self._path}:{iterable.lineno}", yields, collects)]
        return ast.copy_location(ast.Call(ast.Name(_TURNS, ast.Load()), [iterable, *given], []), iterable)

    def _improves(self, node: ast.Compare, best: BestComparison, text: str) -> ast.expr:
        """A comparison of a result with the best one so far as a call."""
        constants = (type(node.ops[0]).__name__, best.side, best.answer, f"{self._path}:{node.lineno}", text)
        arguments = [node.left, node.comparators[0], best.best, *(ast.Constant(value) for value in constants)]
        arguments += [] if best.result is None else [best.result]
        return ast.copy_location(ast.Call(ast.Name(_IMPROVES, ast.Load()), arguments, []), node)

    def _truth(self, node: ast.expr) -> ast.expr:
        """An expression of which only the truth value counts."""
        zero = ast.Constant(0)
        match node:
            case ast.BoolOp():
                node.values = [self._truth(value) for value in node.values]
            case ast.UnaryOp(op=ast.Not(), operand=ast.BinOp()):
                node.operand = self._asked(node.operand, zero, ast.unparse(node), holds=True)
            case ast.UnaryOp(op=ast.Not()):
                node.operand = self._truth(node.operand)
            case ast.BinOp():
                return self._asked(node, zero, ast.unparse(node), holds=False)
        return node

    def _asked(self, node: ast.expr, wanted: ast.expr, text: str, *, holds: bool) -> ast.expr:
        """A remainder as a call; another expression as it is."""
        if not (isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mod)):
            return node
        constants = [ast.Constant(value) for value in (f"{self._path}:{node.lineno}", text, holds)]
        arguments = [node.left, node.right, wanted, *constants]
        return ast.copy_location(ast.Call(ast.Name(_REMAINDER, ast.Load()), arguments, []), node)


def _yields(body: list[ast.stmt]) -> bool:
    """Whether a ``yield`` is in the statements, functions within them too."""
    return any(isinstance(part, ast.Yield | ast.YieldFrom) for statement in body for part in ast.walk(statement))


def _is_simple(node: ast.expr) -> bool:
    """Whether an expression can be evaluated twice: names, attributes, numbers and their sums."""
    return all(isinstance(part, _SIMPLE) for part in ast.walk(node))
