"""The train state: a job's nets, optimizers and helpers, built on a device. Traces and real runs build the same."""

from __future__ import annotations

import inspect
import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LinearLR

from memfit.apply.build_nets import nets_of
from memfit.apply.first_values import (
    builds_without_values,
    give_first_values,
    give_memory,
    gives_first_values,
    take_first_values,
)
from memfit.apply.optimizer_implementation import with_implementation
from memfit.apply.state_streaming import copy_to_host, update_on_host
from memfit.engine.capabilities import CAPABILITIES, WHOLE_STATE
from memfit.engine.ddp import BUCKET_BYTES
from memfit.engine.pipeline import Pipeline
from memfit.engine.protocol import Engine
from memfit.engine.single import Single
from memfit.errors import InputError
from memfit.job import Job, Nets, Turn, is_trained
from memfit.torch_compat.attributes import apply_to_tensors


@dataclass(kw_only=True)
class TrainState:
    """Everything that is trained, on one device."""

    job: Job
    device: torch.device
    nets: Nets
    optimizers: dict[str, Optimizer]
    schedules: dict[str, Any] = field(default_factory=dict)
    scaler: torch.amp.GradScaler | None = None
    ema: Nets = field(default_factory=dict)
    """Averaged copies of the trained nets; empty if the job has no average or this rank keeps none."""
    buckets: dict[str, list[Tensor]] = field(default_factory=dict)
    """By net, the flat copies of gradients that the job's own wrapper (DistributedDataParallel) keeps."""
    engine: Engine = field(default_factory=Single)
    optimizer_state: str = "device"
    """Where optimizer state is between steps: device, or host (for optimizers that ``memfit.apply.state_streaming``
    supports).
    """
    average: str = "device"
    """Where ``ema`` is between its updates: device or host."""
    stepped: dict[str, list[nn.Parameter]] = field(default_factory=dict)
    """The parameters that each optimizer steps."""
    carried: Any = None
    """The ``CarriedState`` of a run: what its forwards carry beside nets, optimizers and buffers."""
    turns: list[Turn] | None = field(default=None, init=False)
    """The turns of every window, where the job has the default ones and they were checked. Not those of a copy of this
    state with another job."""

    def shares(self, optimizers: tuple[str, ...]) -> bool:
        """Whether ranks share the gradients of these optimizers; False if each trains by itself
        (``Job.unsynchronised``).
        """
        if not self.job.unsynchronised:
            return True
        own = {id(p) for name in self.job.unsynchronised if name in self.nets for p in self.nets[name].parameters()}
        return not own or not all(id(p) in own for p in self.parameters_of(optimizers))

    def parameters_of(self, optimizers: tuple[str, ...]) -> list[nn.Parameter]:
        """Returns the parameters that these optimizers step."""
        return [p for name in optimizers for p in self.stepped[name]]


def build(
    job: Job,
    device: torch.device | str,
    engine: Engine | None = None,
    implementation: str = "job",
    *,
    rate: float = 1.0,
    warmup_windows: int = 0,
    optimizer_state: str = "device",
    average: str = "device",
) -> TrainState:
    """Builds a job on a device, and distributes its nets over the ranks of an engine (None: one rank).

    Args:
        implementation: how the optimizers' steps are carried out, as in a plan.
        rate: the factor on the job's learning rates.
        warmup_windows: windows over which the learning rates rise from the job's own.
        optimizer_state, average: device or host, as in ``TrainState``.

    Raises:
        InputError: nets or optimizers are missing or of a wrong type (the message names them), or the engine does not
            support them.
    """
    device, engine = torch.device(device), engine or Single()
    without_values = builds_without_values(job, engine)
    nets = nets_of(job, torch.device("meta") if without_values else device)
    check_nets(job, nets)
    for net in () if without_values else nets.values():
        net.to(device)
    if gives_first_values(job) and not without_values:
        give_first_values(job, nets, device)
    _check_places(engine, optimizer_state, average)
    ema = _averages(job, nets, engine, average)
    nets = engine.place(job, nets)
    if without_values:
        for placed in (nets, ema):
            give_memory(placed, device, parts="cpu" if engine.parts_on_host else device)
        give_first_values(job, nets, device, _modules_of_all_stages(engine))
        take_first_values(ema, nets)
    optimizers = make_optimizers(job, nets)
    engine.check(job, nets, optimizers)
    optimizers = with_implementation(optimizers, implementation)
    stepped = {
        name: [p for group in optimizer.param_groups for p in group["params"]] for name, optimizer in optimizers.items()
    }
    engine.divide(nets, optimizers)
    train_state = TrainState(
        job=job, device=device, nets=nets, optimizers=optimizers, engine=engine, ema=ema, stepped=stepped,
        optimizer_state=optimizer_state, average=average,
    )  # fmt: skip
    if job.wrapper != "none" and not CAPABILITIES[engine.name].several_ranks:
        for name in filter(lambda name: is_trained(nets[name]), nets):
            _wrap(train_state, name)
    _schedule(train_state, rate, warmup_windows)
    if job.precision == "fp16":
        train_state.scaler = torch.amp.GradScaler(device.type)
    return train_state


def _modules_of_all_stages(engine: Engine) -> Mapping[str, Sequence[nn.Module]] | None:
    """Of nets that are cut into stages; None: every rank has all modules."""
    return cast(Pipeline, engine).take_whole_modules() if engine.stages > 1 else None


def _averages(job: Job, nets: Nets, engine: Engine, average: str) -> Nets:
    """The averages of the job's weights, on the device or the host; empty where it keeps none."""
    averages = engine.averages(job, nets) if job.ema is not None else {}
    if average == "host":
        for net in averages.values():
            apply_to_tensors(net, copy_to_host)
    return averages


def _schedule(train_state: TrainState, rate: float, warmup_windows: int) -> None:
    """Multiplies the learning rates by ``rate``, and makes the job's schedules and the warm-up to the larger rate."""
    job, optimizers = train_state.job, train_state.optimizers
    multiply_rates(optimizers, rate)
    train_state.schedules = _checked_schedules(job, job.schedules(optimizers, job.windows))
    if warmup_windows and rate > 1:
        train_state.schedules |= {
            f"warm-up of {name}": LinearLR(optimizer, start_factor=1 / rate, total_iters=warmup_windows)
            for name, optimizer in optimizers.items()
        }


def multiply_rates(optimizers: Mapping[str, Optimizer], rate: float) -> None:
    """Multiplies the learning rates of optimizers in place; a factor of 1 leaves them.

    Raises:
        InputError: an optimizer has no learning rate.
    """
    if rate == 1.0:
        return
    for name, optimizer in optimizers.items():
        for group in optimizer.param_groups:
            if group.get("lr") is None:
                seen, kind = f"optimizer {name!r}", type(optimizer).__name__
                write = "plan with --learning-rate none, or write learning_rate = 1.0 in the plan"
                raise InputError(seen, f"{kind} has no learning rate that can be multiplied", write)
            group["lr"] *= rate


def _wrap(train_state: TrainState, name: str) -> None:
    """Returns the buckets that DistributedDataParallel keeps for a net.

    The first bucket holds all gradients of a dtype. The second forward replaces it by buckets of 25 MiB, which are
    allocated before it is freed (torch/nn/parallel/distributed.py, ``_pre_forward``). With find_unused_parameters,
    buckets have 25 MiB from the start.
    """
    net = train_state.nets[name]
    trained = [p for p in net.parameters() if p.requires_grad]
    kinds: Counter[torch.dtype] = Counter()
    for parameter in trained:
        kinds[parameter.dtype] += parameter.numel()
    forwards = itertools.count()

    def make(sizes: Iterable[tuple[torch.dtype, int]]) -> list[Tensor]:
        return [torch.empty(n, dtype=kind, device=train_state.device) for kind, n in sizes]

    def before_forward(module: nn.Module, inputs: Any) -> None:
        if torch.is_grad_enabled() and next(forwards) == 1:
            train_state.buckets[name] = make(ddp_buckets(trained))

    if train_state.job.wrapper == "ddp_find_unused":
        train_state.buckets[name] = make(ddp_buckets(trained))
    else:
        train_state.buckets[name] = make(kinds.items())
        net.register_forward_pre_hook(before_forward)


def ddp_buckets(parameters: Sequence[nn.Parameter]) -> list[tuple[torch.dtype, int]]:
    """(dtype, elements) of the buckets that DistributedDataParallel makes once it knows the order of the gradients.

    Buckets are filled from the last parameter to the first, separately for each dtype. A bucket is closed when it
    reaches 25 MiB; the first one, when it reaches 1 MiB (torch/csrc/distributed/c10d/reducer.cpp,
    ``compute_bucket_assignment_by_size``).
    """
    open_now: dict[torch.dtype, int] = {}
    closed: list[tuple[torch.dtype, int]] = []
    for parameter in reversed(parameters):
        kind = parameter.dtype
        open_now[kind] = open_now.get(kind, 0) + parameter.numel()
        limit = BUCKET_BYTES if any(dtype is kind for dtype, _ in closed) else (1 << 20)
        if open_now[kind] * kind.itemsize >= limit:
            closed.append((kind, open_now.pop(kind)))
    return closed + list(open_now.items())


def update_ema(train_state: TrainState) -> None:
    """Moves the averaged nets toward the trained ones: ema = decay x ema + (1 - decay) x net."""
    for name, average in train_state.ema.items():
        decay = train_state.job.ema
        assert decay is not None
        old, new = train_state.engine.parts(average), train_state.engine.parts(train_state.nets[name])
        with torch.no_grad():
            if train_state.average == "host":
                update_on_host(old, new, 1 - decay)
            else:
                torch._foreach_lerp_(old, new, 1 - decay)
            for mine, theirs in zip(average.buffers(), train_state.nets[name].buffers(), strict=True):
                mine.copy_(theirs)


def _check_places(engine: Engine, optimizer_state: str, average: str) -> None:
    if "host" in (optimizer_state, average) and engine.name not in WHOLE_STATE:
        raise InputError(
            f"state on the host under {engine.name}",
            "a rank holds a part of the state already",
            f"write one of {', '.join(WHOLE_STATE)} as the engine, or device",
        )


def _kind(value: Any) -> str:
    return "an empty dict" if isinstance(value, dict) else type(value).__name__


def check_nets(job: Job, nets: Any) -> None:
    write = "write nets(self) -> {'name': module}"
    if not isinstance(nets, dict) or not nets:
        raise InputError(f"{type(job).__name__}.nets()", f"gave {_kind(nets)}, not a dict of modules", write)
    for name, net in nets.items():
        if not isinstance(net, nn.Module):
            raise InputError(f"net {name!r}", f"a {type(net).__name__}, not a torch.nn.Module", write)
    if not any(is_trained(net) for net in nets.values()):
        raise InputError(
            f"{type(job).__name__}.nets()",
            "no parameter requires a gradient",
            "leave the trained net's parameters unfrozen",
        )


def make_optimizers(job: Job, nets: Nets) -> dict[str, Optimizer]:
    """Returns the job's optimizers, newly made.

    Raises:
        InputError: they are of a wrong type; the message names which.
    """
    optimizers = job.optimizers(nets)
    _check_optimizers(job, nets, optimizers)
    return dict(optimizers)


def _check_optimizers(job: Job, nets: Nets, optimizers: Any) -> None:
    write = "write optimizers(self, nets) -> {'name': torch.optim.AdamW(nets['name'].parameters())}"
    if not isinstance(optimizers, dict) or not optimizers:
        raise InputError(
            f"{type(job).__name__}.optimizers()", f"gave {_kind(optimizers)}, not a dict of optimizers", write
        )
    owned: dict[int, str] = {}
    for name, optimizer in optimizers.items():
        if not isinstance(optimizer, Optimizer):
            raise InputError(f"optimizer {name!r}", f"a {type(optimizer).__name__}, not a torch.optim.Optimizer", write)
        if wanted := _must_be_given(optimizer.step):
            kind, why = type(optimizer).__name__, "and a window gives its gradients once"
            raise InputError(
                f"optimizer {name!r}", f"{kind} steps with a {wanted}, {why}", "write one such as torch.optim.AdamW"
            )
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if id(parameter) in owned:
                    seen = f"optimizers {owned[id(parameter)]!r} and {name!r}"
                    raise InputError(seen, "both step the same parameter", "give each parameter to one optimizer")
                owned[id(parameter)] = name
    known = {id(p) for net in nets.values() for p in net.parameters()}
    if not known & set(owned):
        raise InputError(f"{type(job).__name__}.optimizers()", "they step no parameter of the nets", write)


def _checked_schedules(job: Job, schedules: Any) -> dict[str, Any]:
    write = "write schedules(self, optimizers, windows) -> {'name': torch.optim.lr_scheduler...}, or {}"
    if not isinstance(schedules, Mapping):
        seen = f"{type(job).__name__}.schedules()"
        raise InputError(seen, f"gave {type(schedules).__name__}, not a dict of schedulers", write)
    for name, schedule in schedules.items():
        for method in ("step", "state_dict", "load_state_dict"):
            if not callable(getattr(schedule, method, None)):
                raise InputError(f"schedule {name!r}", f"a {type(schedule).__name__}, which has no {method}()", write)
        if wanted := _must_be_given(schedule.step):
            raise InputError(
                f"schedule {name!r}",
                f"{type(schedule).__name__} steps by {wanted}, and schedules are stepped once a window by nothing else",
                "write one that follows the windows, such as torch.optim.lr_scheduler.CosineAnnealingLR",
            )
    return dict(schedules)


def _must_be_given(step: Callable[..., Any]) -> str:
    """Names of the required arguments of an optimizer's ``step``."""
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    parameters = inspect.signature(step).parameters.values()
    return ", ".join(
        parameter.name for parameter in parameters if parameter.kind in kinds and parameter.default is parameter.empty
    )
