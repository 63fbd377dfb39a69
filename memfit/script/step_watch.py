"""Follows a training loop that memfit did not write: its windows, its phases, and when enough was seen.

A window ends when every optimizer has stepped. Validation is a forward without gradients of a net that an optimizer
trains, unless it is a part of the window; saving is code that writes tensors to files.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import wraps
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from memfit.events import ALLOCATE
from memfit.nested_tensors import tensors_in
from memfit.script.hand_updates import HandUpdates
from memfit.script.memory_handlers import memory_handler
from memfit.script.net_names import NetNames
from memfit.script.net_weights import has_trained, weights_of
from memfit.script.outcome import KeptVariable, Line
from memfit.script.phase_spans import Cut, KnownOptimizer, PhaseSpan, RefusedRequest, after_frees, phase_spans
from memfit.script.tracer import ScriptTracer
from memfit.script.variables import HeldVariable, held_at_backward, kept_between_steps
from memfit.torch_compat import current_autograd_node
from memfit.torch_compat.attributes import inner_tensors

if TYPE_CHECKING:
    from collections.abc import Iterator


_BY_HAND = -1
"""The number of what steps without an optimizer of torch."""


class EnoughError(BaseException):
    """The script has shown what was asked for."""


@dataclass(kw_only=True)
class StepWatch:
    """What was seen so far. ``on_window`` is called after each optimizer step."""

    tracer: ScriptTracer
    on_window: Callable[[], None] = lambda: None
    on_training: Callable[[], None] = lambda: None
    """Called before a part of a window."""
    cuts: list[Cut] = field(default_factory=lambda: [Cut(phase="setup", start=0)])
    optimizers: dict[int, KnownOptimizer] = field(default_factory=dict)
    steps: list[tuple[int, int]] = field(default_factory=list)
    """(event, optimizer) of each optimizer step."""
    failures: list[RefusedRequest] = field(default_factory=list)
    last: int = 0
    """The event at which the last part of training, or of validation, ended."""
    saves: int = 0
    validations: int = 0
    """After the first step alone: before it, an optimizer has no state."""
    saved_in_setup: bool = False
    early_windows: set[int] = field(default_factory=set)
    """Numbers of windows before those in which a condition held early."""
    in_last_turn: bool = False
    """Whether a loop that was cut short makes its last turn, with which conditions hold that others do not meet."""
    epochs: int = 0
    """Passes over a loader that trained, and came to their end."""
    loaders: int = 0
    """Passes over loaders that began."""
    handler: str = ""
    """The line of the first window whose code handles memory that fails."""
    passes_cut: bool = False
    """Whether a pass over a loader, or a loop, that does not train was left early."""
    kept: tuple[KeptVariable, ...] = ()
    held: list[HeldVariable] = field(default_factory=list)
    """Variables that keep what a backward does not need."""
    depth: int = 0
    """Modules that are in their forward, one within the other."""
    calls: int = 0
    """Forwards of nets, not of modules within them."""
    backwards: int = 0
    """Backwards, not those within another."""
    forwards: dict[str, tuple[int, Line]] = field(default_factory=dict)
    """Parameters of each net that is trained, by its class, and where it was called last."""
    trained_storages: set[int] = field(default_factory=set)
    """Storages of the parameters of each optimizer that has stepped."""
    by_hand: HandUpdates = field(init=False)
    """Steps without an optimizer of torch; counted where the script has none."""
    _alive: WeakSet[Optimizer] = field(default_factory=WeakSet)
    """The optimizers that the script still has."""
    _trained: set[int] = field(default_factory=set)
    _trained_shapes: set[tuple[torch.Size, ...]] = field(default_factory=set)
    """Of the parameters of each net that was trained."""
    _shapes: WeakKeyDictionary[nn.Module, tuple[torch.Size, ...]] = field(default_factory=WeakKeyDictionary)
    _in_window: bool = False
    _epoch_ended: bool = False
    _makes_net: bool = False  # since the phase began
    _window_start: int = 0
    _ended: int = 0
    """Windows that ended, also of optimizers that a later stage of training no longer steps."""
    _counted: int = 0
    """``windows`` when a window ended last."""
    _next_number: int = 0

    def __post_init__(self) -> None:
        self._names = NetNames(self.tracer)
        self.by_hand = HandUpdates(number_of=self.tracer.recorded_number, here=self.tracer.lines.here)

    # ---- phases

    @property
    def phase(self) -> str:
        return self.cuts[-1].phase

    def cut(self, phase: str, start: int, **how: Any) -> None:
        """Begins ``phase`` at event ``start``, or after the frees that directly follow."""
        start, self._makes_net = after_frees(self.tracer.kind, max(start, self.cuts[-1].start)), False
        after_early = self.in_last_turn or self._ended in self.early_windows
        self.cuts.append(Cut(phase=phase, start=start, window=self._ended, after_early=after_early, **how))

    @property
    def windows(self) -> int:
        """Complete windows: the fewest steps of an optimizer, among those that stepped since memory last ran out."""
        since = self.failures[-1].end if self.failures else -1
        stepped = [known for known in self.optimizers.values() if known.steps]
        active = [known for known in stepped if known.last_step > since] or stepped
        return min((known.steps for known in active), default=0)

    @property
    def complete_windows(self) -> int:
        """Complete windows of all stages of a training, of which each has optimizers of its own."""
        return self.windows if self.failures else max(self.windows, self._ended)

    def current(self) -> list[KnownOptimizer]:
        """The optimizers that exist since memory last ran out."""
        since = self.failures[-1].end if self.failures else -1
        known = list(self.optimizers.values())
        return [optimizer for optimizer in known if max(optimizer.made_at, optimizer.last_step) >= since] or known

    def holds_early(self) -> None:
        """Notes that a condition holds early in this window."""
        self.early_windows.add(self._ended)

    def after_operator(self) -> None:
        """Called after each operator: validation goes on as long as gradients are off, and no net is made."""
        if self.phase == "validate" and not torch.is_grad_enabled() and not self._makes_net:
            self.last = len(self.tracer.kind)

    def net_made(self) -> None:
        """Notes a new parameter: a validation is over, and a training of another net begins."""
        self._makes_net = self.depth == 0

    def end_updates(self) -> None:
        """Ends a step that the script made without an optimizer of torch, where one was seen."""
        ended = self.by_hand.take()
        if not ended or self.optimizers.keys() - {_BY_HAND}:
            return
        known = self.optimizers.setdefault(_BY_HAND, KnownOptimizer(kind="", line=self.by_hand.line, made_at=0))
        self._trained |= {id(weight) for net in self.by_hand.nets for weight in net.parameters()}
        self.trained_storages |= self.by_hand.weights
        self._end_step(known, _BY_HAND, ended)

    def training(self, part: str) -> None:
        """Notes that a part of a window runs now."""
        if part != "optimizer":
            self.end_updates()
        if not self.steps and not self.handler:
            self.handler = memory_handler(self.tracer.lines)
        if self.phase != "train":
            self.cut("train", self.last)
        self.cuts[-1].trains = self._in_window = True
        self.on_training()  # may end the trace: what came before it in the window is training too
        if self.tracer.part != part:
            self.tracer.mark(part)

    def epoch_ended(self) -> None:
        """Notes the end of a training pass over a loader."""
        self._epoch_ended = True
        self.epochs += 1

    def pass_cut(self) -> None:
        """Notes that a pass over a loader, or a loop, that does not train is left early."""
        self.passes_cut = True

    # ---- modules

    def enter_module(self, module: nn.Module) -> None:
        """Notes the begin of a module's forward."""
        if self.depth == 0 and current_autograd_node() is None:
            self.calls += 1
            self._names.name(module)
            if torch.is_grad_enabled():
                if has_trained(module):
                    self.training("forward")
                    self.by_hand.trains(module)
                    shapes = self._shapes_of(module)
                    self._trained_shapes.add(shapes)
                    parameters = sum(shape.numel() for shape in shapes)
                    self.forwards[type(module).__name__] = (parameters, self.tracer.lines.here())
            elif self.phase != "validate":
                self.end_updates()
                self._forward_without_gradients(module)
        self.depth += 1

    def function_called(self) -> None:
        """Notes the forward of a net that is no module, once a step was seen."""
        if torch.is_grad_enabled():
            self.forwards.setdefault("", (0, self.tracer.lines.here()))
        elif self.phase == "train":
            self.end_updates()
            self._begin_validation(in_evaluation=False, of_copy=False)

    def forward_lines(self) -> dict[str, Line]:
        """Where each trained net was called last, by its class, the largest net first."""
        forwards = sorted(self.forwards.items(), key=lambda item: -item[1][0])
        return {name: line for name, (_, line) in forwards}

    def _forward_without_gradients(self, module: nn.Module) -> None:
        """Begins validation if the net, or a net it is a copy of, is trained. Others (frozen encoders) belong to the
        window.
        """
        is_trained_itself = any(id(weight) in self._trained for weight in weights_of(module))
        if not is_trained_itself and self._shapes_of(module) not in self._trained_shapes:
            return
        self._begin_validation(in_evaluation=not module.training, of_copy=not is_trained_itself)

    def _begin_validation(self, *, in_evaluation: bool, of_copy: bool) -> None:
        self.validations += bool(self.steps)
        self.cut(
            "validate", self.last, in_evaluation=in_evaluation, within_window=self._in_window,
            after_epoch=self._epoch_ended, of_copy=of_copy, line=self.tracer.lines.here(),
        )  # fmt: skip
        self.tracer.part = "validate"

    def _shapes_of(self, module: nn.Module) -> tuple[torch.Size, ...]:
        if module not in self._shapes:
            lazy = any(is_lazy(parameter) for parameter in module.parameters())
            if lazy:
                return ()
            self._shapes[module] = tuple(parameter.shape for parameter in module.parameters())
        return self._shapes[module]

    def leave_module(self, module: nn.Module) -> None:
        self.depth -= 1
        if self.depth == 0 and self.phase == "validate" and not torch.is_grad_enabled():
            self.last = len(self.tracer.kind)

    # ---- backward and steps

    def backward(self, run: Callable[..., Any]) -> Callable[..., Any]:
        """Context of autograd's engine, a part of the window."""

        def call(*args: Any, **kwargs: Any) -> Any:
            if self.tracer.is_quiet:
                return run(*args, **kwargs)
            nested = current_autograd_node() is not None
            if not nested:
                self.backwards += 1
                self.training("backward")
                self.held += held_at_backward(self.tracer)
            self.tracer.lines.enter_backward()
            try:
                return run(*args, **kwargs)
            finally:
                self.tracer.lines.leave_backward()
                if not nested:
                    self._names.name_gradients(self._alive)
                    self.by_hand.backward_ended()
                    self.tracer.mark("between")
                    self.last = len(self.tracer.kind)

        return call

    def optimizer_made(self, optimizer: Optimizer) -> None:
        """Notes a new optimizer and the parameters that it trains."""
        if self._number(optimizer) not in self.optimizers:
            made = KnownOptimizer(
                kind=type(optimizer).__name__, line=self.tracer.lines.here(), made_at=len(self.tracer.kind)
            )
            self.optimizers[self._number(optimizer)] = made
            if self.phase == "setup":
                self.last = len(self.tracer.kind)
        self._alive.add(optimizer)
        weights = {id(p) for group in optimizer.param_groups for p in group["params"]}
        self.optimizers[self._number(optimizer)].weights |= weights
        self._trained |= weights

    def _number(self, optimizer: Optimizer) -> int:
        """A unique number of the optimizer, also if it reuses the memory of an earlier one."""
        number = optimizer.__dict__.setdefault("_memfit_number", self._next_number)
        self._next_number = max(self._next_number, number + 1)
        return int(number)

    def before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
        """Begins a step. A closure that computes the loss again (as in Lightning) is not a part of the step."""
        self.optimizer_made(optimizer)
        self.training("optimizer")
        kwargs = dict(kwargs)
        if callable(kwargs.get("closure")):
            return args, kwargs | {"closure": self._closure(kwargs["closure"])}
        if len(args) > 1 and callable(args[1]):
            return (args[0], self._closure(args[1]), *args[2:]), kwargs
        if args and callable(args[0]) and not isinstance(args[0], Optimizer):
            return (self._closure(args[0]), *args[1:]), kwargs
        return None

    def _closure(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        @wraps(closure)
        def call() -> Any:
            result = closure()
            self.training("optimizer")
            return result

        return call

    def after_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        """Ends a step: the optimizer's state and gradients are known now."""
        tracer, number = self.tracer, self._number(optimizer)
        known = self.optimizers[number]
        known.states.append(len(optimizer.state))
        for tensor in tensors_in(list(optimizer.state.values())):
            for inner in inner_tensors(tensor):
                if (storage := tracer.recorded_number(inner)) is not None:
                    tracer.categorise(inner, "optimizer")
                    known.state_storages.add(storage)
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                tracer.categorise(parameter, "parameters")
                storage = tracer.recorded_number(parameter)
                if storage is not None:
                    self.trained_storages.add(storage)
                if parameter.grad is not None:
                    tracer.categorise(parameter.grad, "gradients")
                    known.has_sparse |= parameter.grad.layout is not torch.strided
        self._end_step(known, number, len(tracer.kind))

    def _end_step(self, known: KnownOptimizer, number: int, event: int) -> None:
        """Notes a step that ended before ``event``."""
        tracer = self.tracer
        known.steps += 1
        known.last_step = self.last = self._window_start = event
        self.steps.append((event, number))
        if self.windows != self._counted:
            self._ended, self._counted = self._ended + 1, self.windows
        self._in_window = self._epoch_ended = False
        tracer.mark("between")
        if self.windows > 1:
            self.kept = kept_between_steps(tracer)
        self.on_window()

    # ---- saving and failing

    @contextmanager
    def saving(self) -> Iterator[None]:
        """Context in which tensors are written to a file. What is written before training belongs to the setup."""
        if self.phase == "setup":
            self.saved_in_setup = True
            yield
            return
        self.end_updates()
        self.cut("save", self.last)
        self.tracer.part = "save"
        self.saves += bool(self.steps)
        try:
            yield
        finally:
            self.last = len(self.tracer.kind)
            self.cut("train", self.last, trains=False)
            self.tracer.part = "between"

    def failed(self, nbytes: int) -> None:
        """Notes a request that did not fit."""
        self.failures.append(RefusedRequest(window_start=self._window_start, end=len(self.tracer.kind), bytes=nbytes))
        self._window_start = len(self.tracer.kind)

    def _freed(self, failure: RefusedRequest) -> RefusedRequest:
        """A request that did not fit, with the event at which the tensors of its attempt are gone."""
        kinds, end = self.tracer.kind, failure.end
        while end < len(kinds) and kinds[end] != ALLOCATE:
            end += 1
        return replace(failure, freed_at=end)

    def hooks(self) -> list[Any]:
        return [register_optimizer_step_pre_hook(self.before_step), register_optimizer_step_post_hook(self.after_step)]

    def phases(self) -> tuple[PhaseSpan, ...]:
        """Returns (name, first event, past the last) of all phases, in order. Each training window is a phase."""
        return phase_spans(
            self.cuts,
            self.tracer.kind,
            self.optimizers,
            self.steps,
            [self._freed(failure) for failure in self.failures],
            windows=self._ended,
            end=len(self.tracer.kind),
        )
