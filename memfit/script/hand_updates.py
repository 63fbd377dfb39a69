"""Finds steps of training without an optimizer of torch: weights that the script, or a library, updates itself.

``with torch.no_grad(): weight -= rate * weight.grad`` is such a step, and fastai's optimizers make it. It is a write in
place to a trained weight after a backward; it ends where the next forward, backward, validation or save begins.
Weights that are made anew in each step (``weights = weights - rate * gradient``) are not found.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakSet

from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from memfit.script.outcome import NOWHERE, Line
from memfit.torch_compat.attributes import schema_of

_IN_PLACE = ("add", "sub", "mul", "div", "lerp", "addcdiv", "addcmul", "copy")
_UPDATES = frozenset(f"aten::{prefix}{name}_" for prefix in ("", "_foreach_") for name in _IN_PLACE)


@dataclass(kw_only=True)
class HandUpdates:
    """Watches operators outside of backwards.

    Attributes:
        number_of: returns the number of a tensor's storage.
        here: returns the line that runs.
    """

    number_of: Callable[[Tensor], int | None]
    here: Callable[[], Line]
    line: Line = NOWHERE
    """Where the last update is."""
    ended_at: int = 0
    """The event after the last update since the last backward; 0 where there was none."""
    nets: WeakSet[nn.Module] = field(default_factory=WeakSet)
    """The nets that were called with gradients."""
    weights: set[int] = field(default_factory=set)
    """Storages of their trained parameters, and of other tensors that were updated."""
    _called: WeakSet[nn.Module] = field(default_factory=WeakSet)
    """Nets whose weights were not noted yet: those of lazy modules are made within the first forward."""
    _waits: bool = False

    def trains(self, net: nn.Module) -> None:
        """Notes a net that is called with gradients."""
        if net not in self.nets:
            self.nets.add(net)
            self._called.add(net)

    def backward_ended(self) -> None:
        """Notes that gradients are there, and the weights of the nets that were called."""
        self._waits = True
        weights = (weight for net in self._called for weight in net.parameters())
        numbers = (self.number_of(weight) for weight in weights if weight.requires_grad and not is_lazy(weight))
        self.weights.update(number for number in numbers if number is not None)
        self._called.clear()

    def see(self, func: Any, args: Any, event: int) -> None:
        """Notes an operator, after which ``event`` comes, if it updates a weight."""
        if not self._waits or schema_of(func).name not in _UPDATES:
            return
        for tensor in args[0] if isinstance(args[0], list | tuple) else args[:1]:
            number = self.number_of(tensor)
            if number is not None and (number in self.weights or (tensor.requires_grad and tensor.is_leaf)):
                self.weights.add(number)
                self.ended_at, self.line = event, self.here()

    def take(self) -> int:
        """The event after a step that has ended; 0 where there was none. The next one needs a backward first."""
        ended, self.ended_at = self.ended_at, 0
        self._waits = self._waits and not ended
        return ended
