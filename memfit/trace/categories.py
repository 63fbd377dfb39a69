"""Says what the tensors of a train state hold: parameters, gradients, optimizer state, buffers and averages."""

from __future__ import annotations

import itertools

import torch

from memfit.apply.train_state import TrainState
from memfit.errors import InputError
from memfit.job import is_trained
from memfit.nested_tensors import tensors_in
from memfit.torch_compat import DisableTorchFunction
from memfit.torch_compat.attributes import each_parameter
from memfit.trace.tracer import Tracer


def mark(tracer: Tracer, train_state: TrainState, part: str) -> None:
    """Begins a part of the window, after the gradients that exist are categorised.

    Reading thousands of gradients is no torch function of the job's: as one, each would pass the virtual card.

    Raises:
        InputError: a gradient is sparse.
    """
    with DisableTorchFunction():
        for net in train_state.nets.values():
            for parameter in each_parameter(net):
                if (gradient := parameter.grad) is not None:
                    if gradient.layout is torch.sparse_coo:
                        raise _sparse_gradient(train_state)
                    tracer.categorise(gradient, "gradients")
        for tensor, category in train_state.engine.categorised(train_state.nets):
            tracer.categorise(tensor, category)
    tracer.mark(part)


def _sparse_gradient(train_state: TrainState) -> InputError:
    """The error of the first parameter whose gradient is sparse."""
    name = next(
        f"{name}.{path}"
        for name, net in train_state.nets.items()
        for path, parameter in net.named_parameters()
        if parameter.grad is not None and parameter.grad.layout is torch.sparse_coo
    )
    why = "it is sparse, and memfit sums dense gradients over micro-batches and ranks"
    write = "write sparse=False where the module is made, and an optimizer of dense gradients"
    return InputError(f"gradient of {name}", why, write)


def categorise_state(tracer: Tracer, train_state: TrainState) -> None:
    """Categorises everything that stays between windows."""
    with DisableTorchFunction():
        for net in train_state.nets.values():
            for parameter in net.parameters():
                tracer.categorise(parameter, "parameters" if parameter.requires_grad else "frozen")
            for buffer in net.buffers():
                tracer.categorise(buffer, "buffers" if is_trained(net) else "frozen")
        for bucket in itertools.chain(*train_state.buckets.values()):
            tracer.categorise(bucket, "communication")
        for average in train_state.ema.values():
            for tensor in (*average.parameters(), *average.buffers()):
                tracer.categorise(tensor, "ema")
        for optimizer in train_state.optimizers.values():
            for state in optimizer.state.values():
                for tensor in tensors_in(state):
                    tracer.categorise(tensor, "optimizer")
