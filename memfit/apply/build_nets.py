"""A job's nets, made on the device; or on the CPU and moved, where their code asks what tensors hold."""

from __future__ import annotations

import gc
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from memfit.errors import InputError
from memfit.job import Job
from memfit.torch_compat import FakeTensor, current_dispatch_mode, disable_current_modes


def nets_of(job: Job, device: torch.device) -> Any:
    """``job.nets()`` with the device as torch's default.

    Where that fails, the nets are made with real values on the CPU and moved: ``torch.LongTensor(positions)``,
    ``np.asarray(torch.linspace(...))`` or a size that is read from a tensor work there, and not on a card, nor in a
    trace. What fails on the CPU too is raised as the device had it.
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
        remade = _made_on_the_cpu(job)
        if remade is None:
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
    """Raises InputError where a parameter has no shape yet: of what size it is, is known in a forward alone."""
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
    """Puts fake tensors on the device in the place of real parameters and buffers. Tied ones stay tied.

    Integers and booleans are copied by an operator, from which a trace knows what they hold.
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
            for held in (part._parameters, part._buffers):
                for name, tensor in held.items():
                    if tensor is not None and not isinstance(tensor, FakeTensor):
                        held[name] = fake(tensor)  # type: ignore[assignment]
