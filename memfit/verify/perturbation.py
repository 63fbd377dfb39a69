"""What rounding inside of a micro-batch does to its gradients, where an engine changes the graph that makes them.

Sharded engines put functions of their own around modules, so autograd adds up what flows into a tensor in another
order. What that can do is seen by moving every weight by its last bit, up or down at random, and running the window
again (Monte Carlo arithmetic: Parker, 1997, here of the inputs alone): as many roundings as a backward has, each as
large as one of its own. The largest change in a tensor, times ``ROOM``, is what its elements may differ by beside the
order of the sum of micro-batches. On latentsync/tiny FSDP2 takes at most 0.4 of one such change.

Left out: where a last bit decides between two values (an argmax), the change is large, and little is proven there.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from memfit.apply.train_state import TrainState
from memfit.verify.bounds import UNIT
from memfit.verify.recording_engine import RecordedWindow

ROOM = 2.0


def move_last_bits(train_state: TrainState, seed: int = 0) -> None:
    """Every weight of every net becomes the one next to it or nearly so, up or down at random."""
    with torch.no_grad():
        for net in train_state.nets.values():
            for index, parameter in enumerate(net.parameters()):
                if parameter.is_floating_point():
                    parameter.mul_(_factors(parameter, seed + index))


def moved(weights: Mapping[str, Tensor], seed: int = 0) -> dict[str, Tensor]:
    """Copies of weights, moved alike."""
    return {name: value * _factors(value, seed + index) for index, (name, value) in enumerate(weights.items())}


def allow_for(seen: RecordedWindow, other: RecordedWindow, bound: float) -> None:
    """Adds to the magnitudes, of which ``bound`` is taken, what the gradients changed by in ``other``."""
    for name, gradient in seen.gradients.items():
        change = float((other.gradients[name] - gradient).abs().max()) if name in other.gradients else 0.0
        known = torch.maximum(seen.magnitudes.get(name, gradient.abs()), gradient.abs())
        seen.magnitudes[name] = known + ROOM * change / bound


def _factors(like: Tensor, seed: int) -> Tensor:
    generator = torch.Generator(like.device).manual_seed(seed)
    signs = torch.randint(0, 2, like.shape, generator=generator, device=like.device) * 2 - 1
    return 1 + signs.to(like.dtype) * 2 * UNIT
