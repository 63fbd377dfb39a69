"""Builds a job's nets on the device, or on the CPU and then moves them if their code reads the values of tensors."""

from __future__ import annotations

import gc
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from memfit.errors import InputError
from memfit.job import Job
from memfit.torch_compat import FakeTensor, current_dispatch_mode, disable_current_modes
from memfit.torch_compat.attributes import own_buffers, own_parameters


def nets_of(job: Job, device: torch.device) -> Any:
    """Returns ``job.nets()``, built with the device as torch's default.

    If that fails, the nets are built with real values on the CPU and then moved: ``torch.LongTensor(positions)``,
    ``np.asarray(torch.linspace(...))`` and sizes that are read from a tensor work on the CPU, but not on a card or in a
    trace. If the CPU fails too, the device's error is raised.
    """
    traced = current_dispatch_mode() is not None
    try:
        with device:
            built = job.nets()
        _refuse_lazy(job, built)
        return built
    except (torch.OutOfMemoryError, InputError):
        raise
    except Exception as error:
        if not traced and device.type == "cpu":
            raise
        raised_at = error.__traceback__
        remade = _made_on_the_cpu(job)
        if remade is None:  # huggingface_hub clears the tracebacks of all exceptions that led to its own
            error.__traceback__ = raised_at
            raise
        nets = remade
        error.__traceback__ = None
    _refuse_lazy(job, nets)
    _give_back_what_failed()
    if traced:
        move_as_fakes((net for net in nets.values() if isinstance(net, nn.Module)), device)
    return nets


def _made_on_the_cpu(job: Job) -> dict[str, Any] | None:
    try:
        with disable_current_modes(), torch.device("cpu"):
            nets = job.nets()
    except Exception:
        return None
    return nets if isinstance(nets, dict) else None


def _refuse_lazy(job: Job, nets: Any) -> None:
    """Raises InputError if a parameter has no shape yet: only a forward would give it one."""
    for name, net in nets.items() if isinstance(nets, dict) else ():
        for path, parameter in net.named_parameters() if isinstance(net, nn.Module) else ():
            if isinstance(parameter, nn.parameter.UninitializedParameter):
                seen = f"{type(job).__name__}.nets(): {name}.{path}"
                write = "write the size (nn.Linear for nn.LazyLinear), or run the net once on a batch in nets()"
                raise InputError(seen, "a lazy module's parameter has no shape yet", write)


def _give_back_what_failed() -> None:
    gc.collect()
    torch.cuda.empty_cache()


def move_as_fakes(modules: Iterable[nn.Module], device: torch.device) -> None:
    """Replaces real parameters and buffers by fake tensors on the device. Tied ones stay tied.

    Integers and booleans are copied by an operator, so that a trace knows their values.
    """
    fakes: dict[int, Tensor] = {}

    def fake(tensor: Tensor) -> Tensor:
        if id(tensor) not in fakes:
            made = (
                torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)
                if tensor.is_floating_point() or tensor.is_complex()
                else tensor.clone()
            ).to(device)
            fakes[id(tensor)] = nn.Parameter(made, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else made
        return fakes[id(tensor)]

    for module in modules:
        for part in module.modules():
            for held in (own_parameters(part), own_buffers(part)):
                for name, tensor in held.items():
                    if tensor is not None and not isinstance(tensor, FakeTensor):
                        held[name] = fake(tensor)  # type: ignore[assignment]
