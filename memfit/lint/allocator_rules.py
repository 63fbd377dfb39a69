"""Calls of torch whose default or place costs memory: checkpoint without use_reentrant, empty_cache in a loop."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from memfit.lint.source import FUNCTIONS, LOOPS, Finding, Source, dotted, keyword

_CHECKPOINT = "torch.utils.checkpoint"


def default_reentrant(source: Source) -> Iterator[Finding]:
    """``checkpoint(block, x)`` without ``use_reentrant``."""
    functions, modules = _checkpoint_names(source)
    for call in source.calls:
        name = dotted(call.func)
        module, _, function = name.rpartition(".")
        is_checkpoint = name in functions or (
            function in ("checkpoint", "checkpoint_sequential") and module in (*modules, _CHECKPOINT)
        )
        if is_checkpoint and keyword(call, "use_reentrant") is None and not any(k.arg is None for k in call.keywords):
            yield source.finding(
                call, "default-reentrant", f"{name}() without use_reentrant",
                "the old default needs an input that asks for gradients: frozen inputs (LoRA) learn nothing, silently, "
                "and DDP's find_unused_parameters breaks",
                "checkpoint(block, x, use_reentrant=False)",
            )  # fmt: skip


def _checkpoint_names(source: Source) -> tuple[set[str], set[str]]:
    """(names of the functions, names of the module) as this file imports them."""
    functions: set[str] = set()
    modules: set[str] = set()
    for node in source.nodes:
        if isinstance(node, ast.ImportFrom) and node.module == _CHECKPOINT:
            functions |= {alias.asname or alias.name for alias in node.names if alias.name.startswith("checkpoint")}
        elif isinstance(node, ast.ImportFrom) and node.module == "torch.utils":
            modules |= {alias.asname or alias.name for alias in node.names if alias.name == "checkpoint"}
        elif isinstance(node, ast.Import):
            modules |= {alias.asname for alias in node.names if alias.name == _CHECKPOINT and alias.asname}
    return functions, modules


def empty_cache_in_loop(source: Source) -> Iterator[Finding]:
    """``torch.cuda.empty_cache()`` in every step of a training loop."""
    loops = source.training_loops()
    names = {
        alias.asname or alias.name
        for node in source.nodes
        if isinstance(node, ast.ImportFrom) and node.module == "torch.cuda"
        for alias in node.names
        if alias.name == "empty_cache"
    }
    for call in source.calls:
        name = dotted(call.func)
        if name not in names and not name.endswith(("cuda.empty_cache", "get_accelerator().empty_cache")):
            continue
        around = source.loops(call)
        if not (around and around[0] in loops) and not (not around and source.is_step(source.scope(call))):
            continue
        between = []
        for part in source.above(call):
            if isinstance(part, (*LOOPS, *FUNCTIONS)):
                break
            between.append(part)
        if any(isinstance(part, ast.If | ast.ExceptHandler | ast.Try) for part in between):
            continue
        yield source.finding(
            call, "empty-cache-in-loop", "empty_cache() in every step",
            "the next step asks the driver for the same memory again, which waits for the card; PyTorch gives its "
            "cache back by itself before it runs out",
            "# leave it out, or call it once before validation",
        )  # fmt: skip
