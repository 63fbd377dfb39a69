"""Graphs and tensors that live too long: losses that are kept or summed, validation with autograd, late zero_grad."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from memfit.lint.source import FUNCTIONS, LOOPS, Finding, Loop, Scope, Source, called, dotted, names_in, target_names

_NO_GRAD = {"no_grad", "inference_mode"}
_DETACHES = {"item", "detach", "tolist", "numpy", "float", "gather_for_metrics", "cpu_item"}
_VALIDATES = re.compile(
    r"^(?:_?(?:run_|do_|log_)?(?:val|valid|validate|validation|evaluate|evaluation|eval)(?:_\w+)?)$"
)


def kept_losses(source: Source) -> Iterator[Finding]:
    """``losses.append(loss)``: a list that outlives the step and keeps each loss, or a net's output, with its graph."""
    for node, kept, value in _kept(source):
        scope, loops = source.scope(node), source.loops(node)
        trained = source.trained_losses(scope)
        if value not in trained | _outputs(source, scope, trained) or _is_detached(source, scope, value, node):
            continue
        if not loops and not (kept.startswith("self.") and source.is_step(scope)):
            continue
        if kept in trained or _is_made_anew(source, kept, loops) or _feeds_backward(source, scope, kept):
            continue
        yield source.finding(
            node, "kept-loss", f"{kept} keeps every {value} with its graph",
            "memory grows with each step, until it runs out", f"{kept}.append({value}.detach())",
        )  # fmt: skip


def _kept(source: Source) -> Iterator[tuple[ast.expr | ast.stmt, str, str]]:
    """(node, list, name) of ``kept.append(name)`` and ``kept += [name]``."""
    for call in source.calls:
        if called(call) != "append" or not isinstance(call.func, ast.Attribute):
            continue
        if len(call.args) == 1 and isinstance(call.args[0], ast.Name):
            yield call, dotted(call.func.value), call.args[0].id
    for node in source.nodes:
        if isinstance(node, ast.AugAssign) and isinstance(node.op, ast.Add) and isinstance(node.value, ast.List):
            for each in node.value.elts:
                if isinstance(each, ast.Name):
                    yield node, dotted(node.target), each.id


def _outputs(source: Source, scope: Scope, trained: set[str]) -> set[str]:
    """Names of a net's outputs, of which a trained loss is made. A net is what the file asks for its parameters."""
    nets = {dotted(call.func).removesuffix(".parameters") for call in source.calls if called(call) == "parameters"}
    assigned = [node for node in ast.walk(scope) if isinstance(node, ast.Assign)]
    read = {name for node in assigned if set(target_names(node)) & trained for name in names_in(node.value)}
    made = [node for node in assigned if isinstance(node.value, ast.Call) and dotted(node.value.func) in nets]
    return {name for node in made for name in target_names(node)} & read


def _is_made_anew(source: Source, kept: str, loops: list[Loop]) -> bool:
    """Whether a list does not outlive the step; an attribute may be emptied by any method but ``__init__``."""
    if loops:
        return _is_made_in(loops[0], kept)
    functions = [node for node in source.nodes if isinstance(node, FUNCTIONS) and node.name != "__init__"]
    return any(_is_made_in(function, kept) for function in functions)


def summed_losses(source: Source) -> Iterator[Finding]:
    """``total += loss``: a sum whose graph grows with each step."""
    for node in source.nodes:
        if not isinstance(node, ast.AugAssign | ast.Assign):
            continue
        scope = source.scope(node)
        trained, target = source.trained_losses(scope), next(iter(target_names(node)), "")
        if not source.loops(node) or target in trained or not target:
            continue
        loss = _added(node, target, trained)
        if loss is None or _is_detached(source, scope, loss, node) or _feeds_backward(source, scope, target):
            continue
        if _is_made_in(source.loops(node)[0], target, but=node):
            continue
        yield source.finding(
            node, "summed-loss", f"{target} sums {loss} with its graph",
            "the sum holds the graph of every step so far, and memory grows", f"{target} += {loss}.item()",
        )  # fmt: skip


def _added(node: ast.AugAssign | ast.Assign, target: str, trained: set[str]) -> str | None:
    """The loss that a statement adds to a running sum as it is."""
    if isinstance(node, ast.AugAssign):
        added = [node.value] if isinstance(node.op, ast.Add) else []
    else:
        value = node.value.orelse if isinstance(node.value, ast.IfExp) else node.value
        sides = [value.left, value.right] if isinstance(value, ast.BinOp) and isinstance(value.op, ast.Add) else []
        holds = [target in names_in(side) and not _calls(side) for side in sides]
        added = [side for side, held in zip(sides, holds, strict=True) if not held] if any(holds) else []
    for value in added:
        while isinstance(value, ast.BinOp) and isinstance(value.op, ast.Mult | ast.Div):
            value = value.left if not isinstance(value.left, ast.Constant) else value.right
        if isinstance(value, ast.Name) and value.id in trained:
            return value.id
    return None


def _calls(node: ast.AST) -> bool:
    """Whether an expression calls something, such as ``detach``."""
    return any(isinstance(part, ast.Call) for part in ast.walk(node))


def _is_detached(source: Source, scope: Scope, name: str, before: ast.AST) -> bool:
    """Whether the name holds a number or a detached tensor where it is used: ``loss = loss.item()`` stands above."""
    line = getattr(before, "lineno", 0)
    last: ast.Assign | None = None
    for node in ast.walk(scope):
        if isinstance(node, ast.Assign) and name in target_names(node) and node.lineno < line:
            last = node if last is None or node.lineno > last.lineno else last
    return last is not None and any(
        isinstance(part, ast.Call) and called(part) in _DETACHES and _of(part, name) for part in ast.walk(last.value)
    )


def _of(call: ast.Call, name: str) -> bool:
    return name in names_in(call)


def _is_made_in(loop: ast.AST, name: str, but: ast.AST | None = None) -> bool:
    """Whether the loop's own body makes a name anew, so that it does not outlive the step."""
    for node in ast.walk(loop):
        if isinstance(node, ast.Assign) and node is not but and name in target_names(node):
            return True
        if isinstance(node, ast.Call) and called(node) == "clear" and isinstance(node.func, ast.Attribute):
            if dotted(node.func.value) == name:
                return True
        elif isinstance(node, ast.Delete) and name in map(dotted, node.targets):
            return True
    return False


def _feeds_backward(source: Source, scope: Scope, name: str) -> bool:
    """Whether a name becomes part of a loss on which a backward runs."""
    trained = source.trained_losses(scope)
    if name in trained:
        return True
    return any(
        isinstance(node, ast.Assign) and set(target_names(node)) & trained and name in names_in(node.value)
        for node in ast.walk(scope)
    )


def validation_with_autograd(source: Source) -> Iterator[Finding]:
    """``model.eval()`` and then ``model(...)`` outside of no_grad and inference_mode."""
    if _turns_autograd_off(source):
        return
    for call in source.calls:
        if called(call) != "eval" or call.args or not isinstance(call.func, ast.Attribute):
            continue
        net = dotted(call.func.value)
        scope = source.scope(call)
        if not net or net.startswith("?") or _is_off(source, call) or _is_frozen(source, net):
            continue
        end = min(
            (other.lineno for other in source.calls
             if source.scope(other) is scope and other.lineno > call.lineno
             and dotted(other.func) in (f"{net}.train", f"{net}.requires_grad_")),
            default=1 << 30,
        )  # fmt: skip
        if any(source.scope(back) is scope and call.lineno <= back.lineno < end for back, _ in source.backward_calls):
            continue
        if isinstance(scope, ast.Module) and not any(isinstance(node, LOOPS) for node in ast.walk(scope)):
            continue
        for use in source.calls:
            if source.scope(use) is scope and call.lineno < use.lineno < end and dotted(use.func) == net:
                if not _is_off(source, use) and source.loops(use):
                    yield source.finding(
                        use, "validation-with-autograd", f"{net}(...) validates with autograd on",
                        "every activation is kept for a backward that never comes",
                        "with torch.inference_mode():  # around the validation",
                    )  # fmt: skip
                break


def _turns_autograd_off(source: Source) -> bool:
    return any(dotted(call.func).endswith("set_grad_enabled") for call in source.calls)


def _is_off(source: Source, node: ast.AST) -> bool:
    """Whether a node stands inside no_grad or inference_mode, as a block or a decorator."""
    for part in source.above(node):
        if isinstance(part, ast.With | ast.AsyncWith) and any(
            isinstance(item.context_expr, ast.Call) and called(item.context_expr) in _NO_GRAD for item in part.items
        ):
            return True
        if isinstance(part, FUNCTIONS):
            decorators = [each.func if isinstance(each, ast.Call) else each for each in part.decorator_list]
            if any(dotted(each).rpartition(".")[2] in _NO_GRAD for each in decorators):
                return True
            if _is_called_without_grad(source, part):
                return True
    return False


def _is_called_without_grad(source: Source, function: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """Whether every call of a function in this file stands directly inside a no_grad block."""
    uses = [call for call in source.calls if called(call) == function.name]
    return bool(uses) and all(
        any(
            isinstance(part, ast.With)
            and any(isinstance(i.context_expr, ast.Call) and called(i.context_expr) in _NO_GRAD for i in part.items)
            for part in source.above(use)
        )
        for use in uses
    )


def _is_frozen(source: Source, net: str) -> bool:
    """Whether the net's parameters ask for no gradient anywhere in the file."""
    for node in source.nodes:
        if isinstance(node, ast.Call) and dotted(node.func) == f"{net}.requires_grad_":
            return bool(node.args) and isinstance(node.args[0], ast.Constant) and node.args[0].value is False
        if isinstance(node, ast.For) and f"{net}.parameters" in names_in(node.iter):
            return any(
                isinstance(part, ast.Assign) and any(name.endswith(".requires_grad") for name in target_names(part))
                for part in ast.walk(node)
            )
    return False


def gradients_in_validation(source: Source) -> Iterator[Finding]:
    """zero_grad before the forward, and a validation after the step: the gradients live through it."""
    for loop in source.training_loops():
        backward = next(call for call, _ in source.backward_calls if source.holds(loop, call))
        inside = [call for call in source.calls if source.holds(loop, call)]
        zeros = [call.lineno for call in inside if called(call) == "zero_grad"]
        steps = [call.lineno for call in inside if called(call) == "step"]
        if not zeros or max(zeros) > backward.lineno:
            continue
        scope, outer = source.scope(backward), source.loops(backward)[-1]
        for call in source.calls:
            after = call.lineno > max(steps, default=backward.lineno)
            if source.scope(call) is scope and after and source.holds(outer, call) and _VALIDATES.match(called(call)):
                if _is_net_mode(call):
                    continue
                yield source.finding(
                    call, "gradients-in-validation", f"{called(call)}() runs while the last gradients are alive",
                    "they take as many bytes as the trained parameters, when validation needs room",
                    "optimizer.zero_grad(set_to_none=True)  # after optimizer.step(), or before the validation",
                )  # fmt: skip
                break


def _is_net_mode(call: ast.Call) -> bool:
    """Whether a call is ``net.eval()``, which runs nothing."""
    return called(call) == "eval" and not call.args and not call.keywords
