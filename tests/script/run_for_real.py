"""Runs a script on the CPU under PyTorch's profiler, and writes the largest bytes of live tensors of each phase.

``python run_for_real.py OUT OPERATORS SCRIPT ARGS``: OPERATORS are the names, with commas, of the calls whose inner
blocks do not count. The garbage collector rests, as in a trace.
"""

import contextlib
import functools
import gc
import json
import os
import runpy
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.nn.parameter import is_lazy
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _disable_current_modes,
    _get_current_dispatch_mode_stack,
)

from memfit.device.hardware.benchmarks import AllocatorEvents, _peaks

_BEGIN, _LAST = "begin ", "last"


class Phases(TorchDispatchMode):
    """Marks in the profile: where a part of training, validation or saving begins, and where one ended last.

    Validation goes on as long as operators run without gradients. The mode sees them all: one that is entered within
    ``torch.inference_mode`` is silently left at that context's end.
    """

    supports_higher_order_operators = True

    def __init__(self, events: AllocatorEvents) -> None:
        super().__init__()
        self._events = events
        self._trained: set[int] = set()
        self._trained_shapes: set[tuple[torch.Size, ...]] = set()
        self._depth = 0
        self._phase = ""
        self._marks = False

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """True: torch.compile compiles under this mode, which then sees no operators of compiled code."""
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if self._phase == "validate" and not self._marks and not torch.is_grad_enabled():
            self.mark(_LAST)
        return result

    def mark(self, name: str) -> None:
        if name.startswith(_BEGIN):
            self._phase = name.removeprefix(_BEGIN)
        self._marks = True
        with self._events.phase(name):  # an operator itself
            pass
        self._marks = False

    def optimizer_made(self, optimizer: Optimizer) -> None:
        """The setup ends with the last optimizer; what a script fetches after it belongs to the first step."""
        self._trained |= {id(p) for group in optimizer.param_groups for p in group["params"]}
        if not self._phase:
            self.mark(_LAST)

    def step_begins(self, optimizer: Optimizer, *rest: Any) -> None:
        self.mark(_BEGIN + "train")

    def step_ended(self, *rest: Any) -> None:
        self.mark(_LAST)

    def enter(self, module: nn.Module, *rest: Any) -> None:
        if torch.compiler.is_compiling():
            return
        if self._depth == 0 and torch._C._current_autograd_node() is None:
            if torch.is_grad_enabled():
                if any(p.requires_grad for p in weights_of(module)):
                    self._trained_shapes.add(shapes_of(module))
                    self.mark(_BEGIN + "train")
            elif any(id(p) in self._trained for p in weights_of(module)) or shapes_of(module) in self._trained_shapes:
                self.mark(_BEGIN + "validate")
        self._depth += 1

    def leave(self, *rest: Any) -> None:
        if torch.compiler.is_compiling():
            return
        self._depth -= 1
        if self._depth == 0 and self._phase == "validate" and not torch.is_grad_enabled():
            self.mark(_LAST)

    def around(self, function: Callable[..., Any], name: str) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            nested = torch._C._current_autograd_node() is not None or is_compiled_now()
            nested |= name == "save" and not self._phase  # what is saved before training belongs to the setup
            if not nested:
                self.mark(_BEGIN + name)
            result = function(*args, **kwargs)
            if not nested:
                self.mark(_LAST)
            return result

        return call


def weights_of(module: nn.Module) -> Iterator[torch.Tensor]:
    """The parameters, without what ``torch.func`` wraps them in."""
    for parameter in module.parameters():
        weight = parameter
        while torch._C._functorch.is_functorch_wrapped_tensor(weight):
            weight = torch._C._functorch.get_unwrapped(weight)
        yield weight


def shapes_of(module: nn.Module) -> tuple[torch.Size, ...]:
    """What an average of a net's weights, or another copy, has as well."""
    return tuple(parameter.shape for parameter in module.parameters() if not is_lazy(parameter))


def is_compiled_now() -> bool:
    """Whether torch.compile traces a graph: other modes than ``Phases`` are active."""
    return any(not isinstance(mode, Phases) for mode in _get_current_dispatch_mode_stack())


def without_modes(run_backward: Callable[..., Any]) -> Callable[..., Any]:
    """A backward that adds gradients in place, as autograd does where no dispatch mode is active."""

    def run(*args: Any, **kwargs: Any) -> Any:
        if is_compiled_now():
            return run_backward(*args, **kwargs)
        with _disable_current_modes():
            return run_backward(*args, **kwargs)

    return run


def noting(make: Callable[..., None], made: Callable[[Optimizer], None]) -> Callable[..., None]:
    @functools.wraps(make)
    def init(optimizer: Optimizer, *args: Any, **kwargs: Any) -> None:
        make(optimizer, *args, **kwargs)
        made(optimizer)

    return init


def spans(
    marks: Sequence[tuple[int, int, str]], end: int, allocations: Sequence[int]
) -> list[tuple[int, int, str]]:  # fmt: skip
    """(start, end, phase): a phase begins where the one before it ended last, without what was freed right then."""
    answer, phase, start, last = [], "setup", 0, 0
    for at, _, name in marks:
        if name == _LAST:
            last = at
        elif name.removeprefix(_BEGIN) != phase:
            ended = last or at  # a setup without an optimizer has no end
            edge = min(next((time for time in allocations if time >= ended), at), at)
            answer.append((start, edge - 1, phase))
            phase, start = name.removeprefix(_BEGIN), edge
    return [*answer, (start, end, phase)]


def main() -> None:
    out, operators, script = Path(sys.argv[1]).absolute(), sys.argv[2].split(","), os.path.abspath(sys.argv[3])
    sys.argv = sys.argv[3:]
    sys.path[0] = os.path.dirname(script)
    torch.set_num_threads(1)
    gc.collect()
    gc.disable()
    with AllocatorEvents() as events:
        phases = Phases(events)
        torch.save = phases.around(lambda *args, **kwargs: None, "save")
        torch.autograd._engine_run_backward = phases.around(without_modes(torch.autograd._engine_run_backward), "train")
        Optimizer.__init__ = noting(Optimizer.__init__, phases.optimizer_made)
        register_optimizer_step_pre_hook(phases.step_begins)
        register_optimizer_step_post_hook(phases.step_ended)
        register_module_forward_pre_hook(phases.enter)
        register_module_forward_hook(phases.leave, always_call=True)
        with phases, contextlib.suppress(SystemExit):
            runpy.run_path(script, run_name="__main__")
        phases.mark("end")
    records, marks = events._read(operators)
    *marks, (end, _, _) = marks
    allocations = [time for time, nbytes, *_ in records if nbytes > 0]
    peaks = _peaks(records, spans(marks, end, allocations), 0)
    out.write_text(json.dumps({name: peak.without_scratch_bytes for name, peak in peaks.items()}))


if __name__ == "__main__":
    # torch.compile looks globals of hooks up in the module of their name, and "__main__" is the script while it runs.
    from tests.script import run_for_real

    run_for_real.main()
