"""Where trained nets are cut into the stages of a pipeline: modules that run one after the other, in shares.

The modules are those that transformers names for a net (``base_model_pp_plan``, ``_pp_plan``), those that a forward
shows (``module_chain``), or those of the job's own ``pipeline``. A plan names each stage's first module. Where nothing
does, stages get shares of equal cost, counted as operations of a forward on tensors without bytes
(``torch.utils.flop_counter``), of one item of the longest length.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from memfit.blocks import checked_paths, find_module
from memfit.engine.absent_module import StandIn
from memfit.engine.adapters import net_of_transformers
from memfit.engine.collectives import is_memory_failure
from memfit.engine.fake_forward import CPU, WithAnswers, fake_copies, in_copied_process
from memfit.engine.module_chain import ModuleChain, module_chain
from memfit.engine.stage_bounds import best_bounds, cost_of_shares, equal_shares, may_be_stage, named_bounds
from memfit.errors import InputError
from memfit.geometry import shape_of
from memfit.job import Job, Nets, is_trained
from memfit.torch_compat import disable_current_modes
from memfit.torch_compat.attributes import own_buffers, own_parameters
from memfit.torch_compat.batch_norm import BatchNormBase

STAGES_OF_RANK: Mapping[str, int] = {"1f1b": 1, "gpipe": 1, "interleaved_1f1b": 2, "interleaved_zero_bubble": 2}
"""Schedules, and how many stages each rank holds: of those of several, torchtitan's default."""
SCHEDULE = "schedule"
"""The choice of an engine that names the schedule."""
_HOOK = "write pipeline(self, nets) in the job, or leave pp out of the mesh"


@dataclass(frozen=True, kw_only=True)
class PipelineCut:
    """The modules of a pipeline, and each stage's share of them.

    Attributes:
        paths: all modules, ``net.path``, in the order in which they run.
        bounds: the number of each stage's first module, and one past the last.
        stand_ins: of each module, what tells the shapes that it gives.
    """

    paths: tuple[str, ...]
    bounds: tuple[int, ...]
    stand_ins: tuple[StandIn, ...]

    @property
    def stages(self) -> int:
        """How many stages there are."""
        return len(self.bounds) - 1

    def modules_of(self, stage: int) -> range:
        """Numbers of a stage's modules."""
        return range(self.bounds[stage], self.bounds[stage + 1])

    def is_last(self, stage: int) -> bool:
        """Whether no stage follows."""
        return stage == self.stages - 1


def cut_into_stages(
    job: Job,
    nets: Nets,
    stages: int,
    where: str,
    first_modules: Sequence[str] = (),
    device: torch.device | None = None,
) -> PipelineCut:
    """The cut of a job's nets, which are whole.

    Args:
        where: what was asked for, for messages.
        first_modules: the first module of each stage; empty: shares of equal cost.
        device: where nets without values will be.

    Raises:
        InputError: they cannot be cut so; names the module.
    """
    chain = pipeline_modules(job, nets, stages, where)
    paths = chain.paths
    modules = [find_module(nets, path) for path in paths]
    mode, fakes = fake_copies(nets, device)
    copies = [find_module(fakes, path) for path in paths]
    if first_modules:
        bounds = named_bounds(paths, first_modules, stages, where)
    else:
        operations = in_copied_process(lambda: _operations(job, nets, paths))
        bounds = _equal_shares(modules, operations, stages, chain.joined)
    _check_stages(paths, modules, bounds, where)
    stand_ins = tuple(StandIn(path, copied, mode) for path, copied in zip(paths, copies, strict=True))
    return PipelineCut(paths=paths, bounds=bounds, stand_ins=stand_ins)


def _equal_shares(
    modules: Sequence[nn.Module], operations: Sequence[int] | None, stages: int, joined: Set[int]
) -> tuple[int, ...]:
    """Bounds of shares of equal cost that stages may have; where there are none, those of equal cost."""
    sizes = [sum(p.numel() for p in module.parameters()) for module in modules]
    allowed, cost = may_be_stage(modules, joined), cost_of_shares(operations or sizes, sizes)

    def allowed_cost(stage: int, begin: int, end: int) -> tuple[float, ...] | None:
        return cost(stage, begin, end) if allowed(begin, end) else None

    return best_bounds(len(modules), stages, allowed_cost) or equal_shares(operations or sizes, sizes, stages)


def distinct_ranks(
    job: Job, nets: Nets, ranks: int, schedule: str = "1f1b", first_modules: Sequence[str] = ()
) -> tuple[int, ...]:
    """Of a pipeline's ranks the first and the last, and of the others the first of those that hold the same modules.

    Args:
        first_modules: as of ``cut_into_stages``.

    Raises:
        InputError: the nets cannot be cut so.
    """
    stages = ranks * STAGES_OF_RANK[schedule]
    cut = cut_into_stages(job, nets, stages, f"pp={ranks}", first_modules)
    first: dict[Any, int] = {}
    for rank in range(ranks):
        numbers = [cut.modules_of(stage) for stage in range(rank, stages, ranks)]
        held = tuple(tuple(_kind(find_module(nets, cut.paths[number])) for number in own) for own in numbers)
        first.setdefault((held, rank in (0, ranks - 1)), rank)
    return tuple(sorted({0, *first.values(), ranks - 1}))


def schedule_of(choices: Mapping[str, Any]) -> str:
    """The schedule of an engine with these choices."""
    return str(choices.get(SCHEDULE, "1f1b"))


def _kind(module: nn.Module) -> Any:
    return type(module), tuple((tuple(p.shape), p.dtype, p.requires_grad) for p in module.parameters())


def pipeline_modules(job: Job, nets: Nets, stages: int, where: str) -> ModuleChain:
    """The modules that stages share, with paths ``net.path``, in the order in which they run.

    Args:
        where: what was asked for, for messages.

    Raises:
        InputError: they are not known, are fewer than the stages, hold each other, or do not hold what is trained.
    """
    chain = _modules(job, nets, where)
    paths, most = chain.paths, len(chain.paths) - len(chain.joined)
    if most < stages:
        why = f"the nets have {most} modules that run one after the other"
        if chain.joined:
            why += f": from {paths[min(chain.joined)]} on, more of those before is needed than the tensor it is given"
        raise InputError(where, why, f"cut them into {most} stages or less" if most > 1 else _HOOK)
    _check_parameters(nets, paths, [find_module(nets, path) for path in paths], where)
    return chain


def _modules(job: Job, nets: Nets, where: str) -> ModuleChain:
    """The modules in order.

    Raises:
        InputError: neither the job nor transformers names them, and a forward does not show them.
    """
    if type(job).pipeline is not Job.pipeline:
        return _named(checked_paths(job, nets, "pipeline", job.pipeline(nets)))
    trained = [name for name, net in nets.items() if is_trained(net)]
    if len(trained) > 1:
        raise InputError(f"nets {', '.join(trained)} on {where}", "the order in which they run is not known", _HOOK)
    (name,) = trained
    inside, net = net_of_transformers(nets[name])
    base = _base_plan(net)
    if not base:
        chain = module_chain(job, nets, name, where, _HOOK)
        if not chain.paths:
            why = f"transformers has no pipeline plan for {type(net).__name__}, and no list of blocks of it runs once"
            raise InputError(f"net {name!r} on {where}", why, _HOOK)
        return ModuleChain(paths=tuple(f"{name}.{path}" for path in chain.paths), joined=chain.joined)
    paths: list[str] = []
    for key in dict.fromkeys([*base, *(getattr(net, "_pp_plan", None) or {})]):
        path = ".".join(filter(None, (name, inside, key)))
        try:
            module = net.get_submodule(key)
        except AttributeError:
            why = f"transformers' pipeline plan for {type(net).__name__} names it, and the net has none"
            raise InputError(f"module {path} on {where}", why, _HOOK) from None
        listed = isinstance(module, nn.ModuleList)
        paths += [f"{path}.{child}" for child, _ in module.named_children()] if listed else [path]
    return _named(paths)


def _named(paths: Sequence[str]) -> ModuleChain:
    """Modules that are named, each of which may begin a stage."""
    return ModuleChain(paths=tuple(paths), joined=frozenset())


def _base_plan(net: Any) -> list[str]:
    """Keys of the plan of a net's base model, as paths of the net."""
    base, config = getattr(net, "base_model", None), getattr(net, "config", None)
    keys = getattr(config, "base_model_pp_plan", None) or {}
    prefix = f"{net.base_model_prefix}." if base is not net and base is not None else ""
    return [f"{prefix}{key}" for key in keys]


def _check_parameters(nets: Nets, paths: Sequence[str], modules: Sequence[nn.Module], where: str) -> None:
    """Raises InputError where modules hold each other, or where trained parameters or running statistics lie outside of
    them."""
    for number, path in enumerate(paths):
        if "." not in path:
            raise InputError(f"net {path} on {where}", "it is named whole, and its modules are what is cut", _HOOK)
        outer = [other for other in paths if path.startswith(f"{other}.")] + [p for p in paths[:number] if p == path]
        if outer:
            raise InputError(f"module {path} on {where}", f"{outer[0]}, which holds it, is named too", _HOOK)
    inside = {id(part) for module in modules for part in module.modules()}
    for name, net in nets.items():
        if not is_trained(net):
            continue
        for path, part in net.named_modules():
            if id(part) in inside:
                continue
            seen = f"module {name}.{path}".rstrip(".") + f" on {where}"
            trained = [own for own, p in own_parameters(part).items() if p is not None and p.requires_grad]
            if trained:
                why = f"it holds trained parameters outside of the modules that run in order: {', '.join(trained)}"
                moved = "move them into a module of their own that runs in order, or leave pp out of the mesh"
                raise InputError(seen, why, _HOOK if path else moved)
            if isinstance(part, BatchNormBase) and own_buffers(part):
                raise InputError(seen, "it keeps running statistics outside of the modules that run in order", _HOOK)


def _check_stages(paths: Sequence[str], modules: Sequence[nn.Module], bounds: Sequence[int], where: str) -> None:
    """Raises InputError where two stages would hold one parameter, or where one holds none."""
    holder: dict[int, tuple[int, str]] = {}
    for stage, (begin, end) in enumerate(pairwise(bounds)):
        trained = 0
        for path, module in zip(paths[begin:end], modules[begin:end], strict=True):
            for parameter in module.parameters():
                trained += parameter.requires_grad
                first = holder.setdefault(id(parameter), (stage, path))
                if first[0] != stage:
                    why = f"it shares a parameter with {first[1]}, and they are on stages {first[0]} and {stage}"
                    raise InputError(f"module {path} on {where}", why, "untie them, or leave pp out of the mesh")
        if not trained:
            why = f"no parameter of stage {stage} is trained ({paths[begin]} to {paths[end - 1]})"
            raise InputError(where, why, "write a smaller pp")


def _operations(job: Job, whole: Nets, paths: Sequence[str]) -> list[int] | None:
    """Operations of each module's forward; None where the job's forward cannot run without values."""
    mode, nets = fake_copies(whole, CPU, everywhere=True)
    modules = [find_module(nets, path) for path in paths]
    counter = FlopCounterMode(display=False)
    counts = dict.fromkeys(map(id, modules), 0)

    def before(module: nn.Module, args: Any) -> None:
        counts[id(module)] -= counter.get_total_flops()

    def after(module: nn.Module, args: Any, output: Any) -> None:
        counts[id(module)] += counter.get_total_flops()

    hooks = [
        hook
        for module in modules
        for hook in (module.register_forward_pre_hook(before), module.register_forward_hook(after))
    ]
    try:
        with (
            disable_current_modes(),
            torch.no_grad(),
            torch.random.fork_rng(devices=[]),
            mode,
            counter,
            WithAnswers(),
            CPU,
        ):
            batch = job.batch(shape_of(job, job.longest or 1))
            for turn in job.turns([]):
                turn.loss(nets, batch, {})
    except Exception as error:
        if is_memory_failure(error):
            raise
        return None
    finally:
        for hook in hooks:
            hook.remove()
    return [counts[id(module)] for module in modules]


def replace_module(nets: Nets, path: str, module: nn.Module) -> nn.Module:
    """Puts a module in the place of another; gives the one that was there."""
    parent, _, name = path.rpartition(".")
    holder = find_module(nets, parent)
    before = holder.get_submodule(name)
    setattr(holder, name, module)
    return before
