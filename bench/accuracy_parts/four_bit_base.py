"""4-bit weights of bitsandbytes as Lightning's Fabric makes them, on a card whose CUDA library is not there.

In bitsandbytes 0.42, which litgpt requires (rows of 2023 used 0.41, whose functions allocate the same), Python code
makes every tensor and hands pointers to a C library, which writes in place. Here the library does nothing, so that a
trace sees what the library's own code allocates: packed weights with a float32 for each 64 values (or, quantized again,
a byte, and a float32 for each 256 of these); a dequantized weight in float16 and its copy in the compute type in each
forward and backward. ``MatMul4Bit`` keeps its input as an attribute of the graph's node, where a backward does not free
it: it lives as long as the loss.
"""

from __future__ import annotations

import io
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from typing import Any

import torch
from torch import Tensor, nn

from bench.accuracy_parts.absent_library import AbsentLibrary, nothing
from memfit.device.virtual.patching import replaced

MODES = ("nf4", "nf4-dq", "fp4", "fp4-dq")
"""Of Lightning's ``BitsandbytesPrecision``; litgpt's ``quantize`` writes ``bnb.`` in front."""


def _true(*args: Any) -> bool:
    return True


@contextmanager
def without_kernels() -> Iterator[None]:
    """A context in which bitsandbytes 0.42 makes its tensors and computes nothing."""
    with warnings.catch_warnings(), redirect_stdout(io.StringIO()):
        warnings.filterwarnings("ignore", message=".*compiled without GPU support.*")
        import bitsandbytes.functional as functional
    instead = dict.fromkeys(("get_ptr", "pre_call", "post_call"), nothing)
    kernels = {"adam": (nothing, nothing, nothing)}
    with replaced(functional, lib=AbsentLibrary(), is_on_gpu=_true, str2optimizer32bit=kernels, **instead):
        yield


@contextmanager
def module_init(mode: str) -> Iterator[Callable[[nn.Module], nn.Module]]:
    """``Fabric.init_module`` on a card in bf16: each ``nn.Linear`` made inside is quantized as soon as it is made.

    Args:
        mode: one of ``MODES``.

    Yields:
        What ``Fabric.setup_module`` does to the net: it sets the type that layers compute in.
    """
    from lightning.fabric.plugins import BitsandbytesPrecision

    precision = BitsandbytesPrecision(mode, torch.bfloat16)  # type: ignore[arg-type]
    with torch.device("cuda"), precision.module_init_context():
        yield precision.convert_module


def scales(net: nn.Module) -> Iterator[Tensor]:
    """What the quantized weights of a net hold beside their packed values."""
    states = [getattr(parameter, "quant_state", None) for parameter in net.parameters()]
    while states:
        state = states.pop()
        if state is not None:
            states.append(state.state2)
            yield from (value for value in vars(state).values() if isinstance(value, Tensor))
