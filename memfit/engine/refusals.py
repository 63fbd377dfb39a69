"""What sharding engines refuse by name."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor
from torch.optim import Optimizer

from memfit.errors import InputError
from memfit.job import Job, Nets

ELEMENTWISE = ("Adam", "AdamW", "SGD", "RMSprop", "Adagrad", "NAdam", "RAdam", "Adadelta", "Adamax", "ASGD", "Rprop")
"""Optimizers of torch whose step of an element depends on that element alone: a shard's step is the whole one's."""


def check_shared(job: Job, engine: str) -> None:
    """Raises InputError where ranks train a net of the job by themselves."""
    if job.unsynchronised:
        raise InputError(
            f"unsynchronised = {job.unsynchronised!r} on --engine {engine}",
            "it has one gradient for all ranks",
            "write --engine ddp",
        )


def check_contiguous(path: str, parameter: Tensor, engine: str) -> None:
    """Raises InputError where the elements of a parameter do not lie row by row: torch cuts no other ones."""
    if not parameter.is_contiguous():
        raise InputError(
            f"parameter {path} on --engine {engine}",
            f"its elements do not lie row by row (shape {tuple(parameter.shape)}, strides {parameter.stride()}), "
            "so that it cannot be sharded",
            "write net.to(memory_format=torch.contiguous_format) or parameter.contiguous() in nets(), or --engine ddp",
        )


DTENSOR_STEP = "dtensor_step"
"""True in an optimizer's class: its step computes with torch's operators alone and takes DTensors, so that the step of
parts is that of whole tensors, whatever it mixes."""


def check_turns(job: Job, nets: Nets, optimizers: Mapping[str, Optimizer], engine: str) -> None:
    """Raises InputError where one turn steps both a net that ranks share and one that each trains by itself."""
    own = {id(p) for name in job.unsynchronised if name in nets for p in nets[name].parameters()}
    for turn in job.turns(list(optimizers)):
        stepped = [id(p) in own for name in turn.optimizers for g in optimizers[name].param_groups for p in g["params"]]
        if any(stepped) and not all(stepped):
            raise InputError(
                f"turn {turn.name!r} on --engine {engine}",
                f"it steps both unsynchronised nets ({', '.join(job.unsynchronised)}) and shared ones",
                "give them turns of their own, or write --engine single",
            )


def check_dtensor_step(name: str, optimizer: Optimizer, engine: str) -> None:
    """Raises InputError where an optimizer's step of DTensors may be another than that of whole tensors."""
    if not getattr(type(optimizer), DTENSOR_STEP, False):
        check_elementwise(name, optimizer, engine, "a part of a parameter")


def check_elementwise(name: str, optimizer: Optimizer, engine: str, part: str, but: tuple[str, ...] = ()) -> None:
    """Raises InputError where an optimizer's step of a part may be another than that of the whole.

    Args:
        part: what it would step, in words.
        but: names of ``ELEMENTWISE`` that the engine cannot carry all the same.
    """
    kind = type(optimizer).__name__
    if is_elementwise(optimizer) and kind not in but:
        return
    raise InputError(
        f"optimizer {name!r} on --engine {engine}",
        f"the step of {kind} on {part} may differ from its step on the whole",
        "write --engine ddp, or an optimizer such as torch.optim.AdamW",
    )


def is_elementwise(optimizer: Optimizer) -> bool:
    """Whether an optimizer is known to step each element by itself."""
    kind = type(optimizer)
    return kind.__module__.startswith("torch.optim") and kind.__name__ in ELEMENTWISE
