"""Whether a loss leaves the gradients of a window's earlier micro-batches as they are.

A loss that was taken over from a loop often begins with ``optimizer.zero_grad()``. With one micro-batch it changes
nothing, since gradients are freed after each step. With several, all but the last would count for nothing, in silence.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from memfit.apply.train_state import TrainState
from memfit.errors import InputError
from memfit.job import Turn
from memfit.torch_compat.attributes import version_of

Kept = Sequence[tuple[nn.Parameter, Tensor, int]]


def kept_gradients(train_state: TrainState, turn: Turn) -> Kept:
    """The gradients that a turn has so far, and their versions."""
    parameters = train_state.parameters_of(turn.optimizers)
    return [(p, p.grad, version_of(p.grad)) for p in parameters if p.grad is not None]


def check_kept(train_state: TrainState, turn: Turn, kept: Kept) -> None:
    """Raises InputError where a loss has freed or changed what ``kept_gradients`` gave before it."""
    for parameter, gradient, version in kept:
        if parameter.grad is gradient and version_of(gradient) == version:
            continue
        freed = parameter.grad is not gradient
        names = (f"{name}.{path}" for name, net in train_state.nets.items() for path, p in net.named_parameters()
                 if p is parameter)  # fmt: skip
        raise InputError(
            f"turn {turn.name!r}",
            f"its loss {'frees' if freed else 'changes'} the gradients of earlier micro-batches "
            f"({next(names, 'of a parameter')}), so that they would not count{'' if freed else ' as they were'}",
            f"take zero_grad(){'' if freed else ' or backward()'} out of the loss: gradients are freed after each step",
        )
