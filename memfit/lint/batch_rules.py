"""Batches and ranks: division by a constant, samplers without set_epoch, data sharded twice, averages on every rank."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from memfit.lint.source import Finding, Source, called, dotted, is_constant, keyword, names_in, target_names

_RANKS = {"DistributedSampler", "init_process_group", "DistributedDataParallel", "DDP", "Accelerator", "fully_shard"}
_AVERAGES = {"EMA", "EMAModel", "AveragedModel", "ModelEmaV2", "ModelEmaV3", "ExponentialMovingAverage"}
_MAIN = re.compile(
    r"is_(?:local_)?main|main_process|is_master|master_process|is_global_zero|rank(?:\(\))?\s*==\s*0|is_rank_?0"
)
_FRAMEWORKS = {"lightning", "pytorch_lightning", "ignite", "composer"}


def constant_accumulation(source: Source) -> Iterator[Finding]:
    """``loss / accumulation_steps`` over a loader whose last batch is short."""
    ragged = _ragged_loaders(source)
    for loop in source.training_loops():
        backward, losses = next(pair for pair in source.backward_calls if source.holds(loop, pair[0]))
        if not isinstance(loop, ast.For) or not names_in(loop.iter) & ragged:
            continue
        steps = {
            ast.dump(node.right)
            for node in ast.walk(loop)
            if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mod)
        }
        for node in ast.walk(loop):
            divisor = _divisor(node, losses, backward)
            if divisor is None or is_constant(divisor, 1):
                continue
            if ast.dump(divisor) in steps or any("accum" in name.lower() for name in names_in(divisor)):
                yield source.finding(
                    node, "constant-accumulation",
                    f"each micro-batch counts as 1 / {ast.unparse(divisor)}, and the loader's last batch is short",
                    "a sample of a short batch weighs more than the others, and a short last window learns less",
                    "guard.backward(loss, units)  # of memfit.guard; or DataLoader(..., drop_last=True)",
                )  # fmt: skip
                break


def _divisor(node: ast.AST, losses: set[str], backward: ast.Call) -> ast.expr | None:
    """What a loss is divided by: ``loss = loss / n``, ``loss = f(x) / n``, ``loss /= n``, ``loss * (1 / n)``."""
    if isinstance(node, ast.AugAssign) and isinstance(node.op, ast.Div) and set(target_names(node)) & losses:
        return node.value
    weighed = node.value if isinstance(node, ast.Assign) else node
    if not isinstance(weighed, ast.BinOp) or weighed.lineno > backward.lineno:
        return None
    if isinstance(node, ast.Assign):
        is_loss = isinstance(weighed.left, ast.Call) and bool(set(target_names(node)) & losses)
    else:
        is_loss = dotted(weighed.left) in losses
    if not is_loss:
        return None
    inverse = weighed.right
    if isinstance(weighed.op, ast.Mult) and isinstance(inverse, ast.BinOp) and isinstance(inverse.op, ast.Div):
        return inverse.right if is_constant(inverse.left, 1) else None
    return inverse if isinstance(weighed.op, ast.Div) else None


def _ragged_loaders(source: Source) -> set[str]:
    """Names of loaders of this file whose last batch may be short."""
    ragged: set[str] = set()
    for node in source.nodes:
        if not isinstance(node, ast.Assign) or not isinstance(node.value, ast.Call):
            continue
        call = node.value
        size = keyword(call, "batch_size") or (call.args[1] if len(call.args) > 1 else None)
        if called(call) != "DataLoader" or size is None or is_constant(size, 1) or is_constant(size, None):
            continue
        dropped = keyword(call, "drop_last")
        if dropped is None or is_constant(dropped, False):
            ragged |= set(target_names(node))
    return ragged


def missing_set_epoch(source: Source) -> Iterator[Finding]:
    """A DistributedSampler that shuffles, in a file that never calls set_epoch."""
    if any(called(call) == "set_epoch" for call in source.calls) or _imports(source) & _FRAMEWORKS:
        return
    if not source.training_loops() or any(called(call) in ("Trainer", "Seq2SeqTrainer") for call in source.calls):
        return
    for call in source.calls:
        if called(call) == "DistributedSampler" and not is_constant(keyword(call, "shuffle"), False):
            yield source.finding(
                call, "no-set-epoch", "DistributedSampler shuffles, and set_epoch is never called",
                "every epoch has the order of the first", "sampler.set_epoch(epoch)  # at the start of each epoch",
            )  # fmt: skip


def sharded_twice(source: Source) -> Iterator[Finding]:
    """Data that is split over ranks and then split again."""
    split, loaders = _names_of(source, _splits), _names_of(source, lambda call: called(call) == "DataLoader")
    samplers = _names_of(source, lambda call: called(call) == "DistributedSampler")
    accelerators = _names_of(source, lambda call: called(call) == "Accelerator")
    for call in source.calls:
        if called(call) == "DistributedSampler" and call.args and names_in(call.args[0]) & split.keys():
            yield _twice(source, call, "a dataset that was split by rank gets a DistributedSampler")
        if called(call) == "prepare" and dotted(call.func).rpartition(".")[0] in accelerators:
            for argument in call.args:
                loader = loaders.get(dotted(argument))
                if loader is None:
                    continue
                given = names_in(loader)
                inline = any(
                    called(part) == "DistributedSampler" for part in ast.walk(loader) if isinstance(part, ast.Call)
                )
                if inline or given & samplers.keys():
                    yield _twice(
                        source, call, f"{dotted(argument)} has a DistributedSampler, and prepare splits it again"
                    )
                elif given & split.keys():
                    yield _twice(source, call, f"{dotted(argument)} reads a split dataset, and prepare splits it again")


def _twice(source: Source, call: ast.Call, what: str) -> Finding:
    return source.finding(
        call, "sharded-twice", what, "each rank sees 1 / world² of the data, and most samples are never seen",
        "split once: give the whole dataset and let the sampler or prepare() split it",
    )  # fmt: skip


def _splits(call: ast.Call) -> bool:
    if called(call) == "split_dataset_by_node":
        return True
    if called(call) != "shard":
        return False
    shards = keyword(call, "num_shards") or next(iter(call.args), None)
    return shards is not None and bool(re.search(r"world|num_processes|n_ranks|size", ast.unparse(shards)))


def _names_of(source: Source, is_kind: object) -> dict[str, ast.Call]:
    assert callable(is_kind)
    return {
        name: node.value
        for node in source.nodes
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call) and is_kind(node.value)
        for name in target_names(node)
    }


def average_on_every_rank(source: Source) -> Iterator[Finding]:
    """An average of the weights that every rank makes and holds."""
    if not any(called(call) in _RANKS for call in source.calls) and not _imports(source) & {"accelerate", "deepspeed"}:
        return
    for node in source.nodes:
        if not isinstance(node, ast.Assign) or not isinstance(node.value, ast.Call):
            continue
        call = node.value
        copied = called(call) == "deepcopy" and any("ema" in name.lower() for name in target_names(node))
        if called(call) not in _AVERAGES and not copied:
            continue
        if any(isinstance(part, ast.If) and _MAIN.search(ast.unparse(part.test)) for part in source.above(node)):
            continue
        yield source.finding(
            node, "average-on-every-rank", f"{target_names(node)[0]} is made on every rank",
            "each card holds a copy of the weights that only the rank that saves needs",
            "if rank == 0: ema = ...  # and update it there only; unsharded weights are the same on all ranks",
        )  # fmt: skip


def _imports(source: Source) -> set[str]:
    modules: set[str] = set()
    for node in source.nodes:
        if isinstance(node, ast.Import):
            modules |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            modules.add(node.module.partition(".")[0])
    return modules
