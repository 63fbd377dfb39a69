"""What to change in the project that a job stands for, so that it trains as the plan says: its keys and lines."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from memfit.job import Job, Nets
from memfit.plan import Plan

if TYPE_CHECKING:
    from rich.console import Console

_BY_MODE = {
    "full": "module.forward = functools.partial(checkpoint, module.forward, use_reentrant=False), of "
    "torch.utils.checkpoint",
    "selective": "torch.utils.checkpoint.checkpoint(..., use_reentrant=False, context_fn=...) around module.forward, "
    "whose context keeps the outputs of matmuls, convolutions and attention",
    "offload": "with torch.autograd.graph.save_on_cpu(pin_memory=True): around module.forward",
}
"""What a mode is in plain PyTorch, for modules that no switch of the project covers."""
_SHOWN = 3
_PROJECT_KEYS = {
    "fused optimizer": ("optimizer", "fused"),
    "free gradients before validation and saving": ("free_gradients", "yes"),
    "optimizer state on the host": ("offload_optimizer", "cpu"),
}
"""Options of a plan by the key that a project has for them; others are called by their own names."""


@dataclass(frozen=True, kw_only=True)
class UpstreamEdit:
    """One choice of a plan, and what to write where."""

    option: str
    """A setting of the job, or a choice of the plan."""
    value: str
    write: str
    """The file and key, or the code line."""
    modules: tuple[str, ...] = ()
    """Paths of the modules that it is about, where they are not all that a switch covers."""


def upstream_changes(job: Job, name: str, plan: Plan, nets: Nets | None = None) -> list[UpstreamEdit]:
    """What the plan sets, and what it has otherwise than the project's own defaults; empty for a job without a project.

    Args:
        name: the job's name, whose part after the slash is the variant.
        nets: the job's, where they were built before.
    """
    says = job.upstream
    if not says:
        return []
    wanted = {key: value for key, value in _choices(job, plan) if key in says}
    wanted |= {key: value for key, value in _applied(plan) if key in says and key not in wanted}
    variant = name.rpartition("/")[2]
    plain = [
        UpstreamEdit(option=key, value=_text(value), write=written)
        for key, value in wanted.items()
        if (written := _written(says[key], value, variant)) is not None
    ]
    return plain + list(_recompute(job, plan, variant, nets))


def _choices(job: Job, plan: Plan) -> Iterator[tuple[str, Any]]:
    yield "micro_batch", plan.micro_batch
    micro_batches = max(len(rank) for rank in plan.micro_batches)
    if micro_batches > 1:
        yield "accumulation", micro_batches
    if plan.ranks > 1:
        yield "devices", plan.ranks
    yield "engine", plan.engine
    if plan.implementation != "job":
        yield "optimizer", plan.implementation
    yield from plan.validation.settings.items()
    for name, value in plan.settings.items():
        if value != getattr(type(job), name, None):
            yield name, value
    yield from getattr(getattr(plan, "validation", None), "settings", {}).items()


def _applied(plan: Plan) -> Iterator[tuple[str, str]]:
    """The plan's options that are applied and save something, as keys: ``expandable allocator`` is one with ``_``."""
    for option in plan.options:
        if option.applied and option.saves_bytes:
            yield _PROJECT_KEYS.get(option.name, (option.name.replace(" ", "_").replace("-", "_"), "yes"))


def _written(text: str | Mapping[str, str], value: Any, variant: str) -> str | None:
    template = text if isinstance(text, str) else text.get(_text(value))
    return None if template is None else template.replace("{value}", _text(value)).replace("{variant}", variant)


def _text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _recompute(job: Job, plan: Plan, variant: str, nets: Nets | None) -> Iterator[UpstreamEdit]:
    """The project's switch where it does what the plan says, and a line for each other group of modules."""
    from memfit.planner.predict import checkpoint_all, plain_nets

    nets = plain_nets(job) if nets is None else nets
    modes = {path: mode for path, mode in plan.checkpointing.items() if mode != "keep"}
    switched = checkpoint_all(job, nets)
    key = job.upstream.get("checkpointing")
    full = {path for path, mode in modes.items() if mode == "full"}
    on, was_on = bool(switched) and set(switched) <= full, type(job).checkpoint == "all"
    if key is not None and (on != was_on if "{value}" in key else on):
        yield UpstreamEdit(option="checkpointing", value=_text(on), write=_written(key, on, variant) or "")
    left = {path: mode for path, mode in modes.items() if not (on and path in switched)}
    lines = {name.partition(" ")[2]: text for name, text in job.upstream.items() if name.startswith("recompute ")}
    for prefix, text in lines.items():
        covered = tuple(path for path, mode in left.items() if mode == "full" and _under(path, prefix))
        if covered:
            yield UpstreamEdit(
                option="recompute", value="full", write=_written(text, "full", variant) or "", modules=covered
            )
            left = {path: mode for path, mode in left.items() if path not in covered}
    for mode, line in _BY_MODE.items():
        paths = tuple(path for path, chosen in left.items() if chosen == mode)
        if paths:
            yield UpstreamEdit(option="recompute", value=mode, write=line, modules=paths)


def _under(path: str, prefix: str) -> bool:
    return path == prefix or path.startswith(f"{prefix}.")


def show_upstream(changes: Iterable[UpstreamEdit], console: Console | None = None) -> None:
    """Prints each change with its value; nothing where there is none."""
    from memfit.show.console import make_console

    console = console or make_console()
    for number, change in enumerate(changes):
        if number == 0:
            console.print("\nTo train so in the project itself, change")
        console.print(f"{change.option} = {change.value}\n  {change.write}", markup=False)
        if change.modules:
            more = len(change.modules) - _SHOWN
            also = f" and {more} more" if more > 0 else ""
            console.print(f"  for {', '.join(change.modules[:_SHOWN])}{also}", markup=False)
