"""DeepSpeed's engine in a loop: ``deepspeed.initialize`` of one rank, as its own Python code allocates.

What it compiles (its Adam on the host) writes in place, and does nothing here.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterator
from typing import Any

from torch import nn

from bench.accuracy_parts.absent_library import AbsentLibrary
from memfit.device.virtual.fake_group import predicted_ranks
from memfit.device.virtual.patching import replaced


@contextlib.contextmanager
def without_kernels() -> Iterator[None]:
    """A context in which DeepSpeed takes the virtual card for CUDA and compiles nothing. Enter it before the card is:
    on one, the import looks for CUDA's compiler."""
    with replaced(os, environ={**os.environ, "DS_ACCELERATOR": "cuda"}):
        import deepspeed
        from deepspeed.ops.op_builder.builder import OpBuilder
    deepspeed.utils.logger.setLevel(logging.ERROR)
    with replaced(OpBuilder, load=lambda builder, verbose=True: AbsentLibrary()):
        yield


@contextlib.contextmanager
def one_rank() -> Iterator[None]:
    """A process group of one rank, on the virtual card, with the variable that DeepSpeed's launcher sets."""
    with predicted_ranks(1), replaced(os, environ={**os.environ, "LOCAL_RANK": "0"}):
        yield


def engine(net: nn.Module, batch: int, configuration: dict[str, Any]) -> Any:
    """What ``deepspeed.initialize`` makes of a net: forward, ``backward(loss)`` and ``step()`` are the engine's."""
    import deepspeed

    config = {"train_batch_size": batch, "steps_per_print": 10**9} | configuration
    return deepspeed.initialize(model=net, model_parameters=net.parameters(), config=config)[0]
