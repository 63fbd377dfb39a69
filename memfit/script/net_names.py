"""Names what a script trains: the paths of its modules, and the kinds of parameters, buffers and gradients."""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from memfit.script.tracer import ScriptTracer


class NetNames:
    """Gives the tracer names and kinds, once for each module."""

    def __init__(self, tracer: ScriptTracer) -> None:
        self._tracer = tracer
        self._named: set[int] = set()

    def name(self, module: nn.Module) -> None:
        """Records the paths of modules and the kinds of parameters, at the first forward of each net."""
        if id(module) in self._named or any(is_lazy(tensor) for tensor in (*module.parameters(), *module.buffers())):
            return
        self._named.update(id(inner) for inner in module.modules())
        self._tracer.name_modules({type(module).__name__: module})
        for parameter in module.parameters():
            self._tracer.categorise(parameter, "parameters" if parameter.requires_grad else "frozen")
        for buffer in module.buffers():
            self._tracer.categorise(buffer, "buffers")

    def name_gradients(self, optimizers: Iterable[Optimizer]) -> None:
        """Categorises the gradients that exist: before a step, other tensors may take their place."""
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    if parameter.grad is not None:
                        self._tracer.categorise(parameter.grad, "gradients")
