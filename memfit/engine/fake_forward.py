"""Forwards of a job on tensors without bytes, which show what its nets do before they are cut.

They run in a copy of this process: a library may keep a tensor for later forwards, as BEiT keeps indices of positions,
and this process would go on with one that has no values.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

from memfit.device.virtual.assumptions import Assumptions
from memfit.device.virtual.data_dependent import NOT_HANDLED, answer_operator
from memfit.device.virtual.grouped_products import GroupedProductsMode
from memfit.engine.absent_module import fake_like
from memfit.engine.collectives import is_memory_failure
from memfit.errors import InputError, describe
from memfit.forked_process import ForkedProcess, NoResultError
from memfit.geometry import shape_of
from memfit.job import Job, Nets
from memfit.torch_compat import FakeTensorMode, TorchDispatchMode, disable_current_modes

CPU = torch.device("cpu")
"""Where forwards run: a copied process cannot use a card, and what a net does is the same."""
ITEMS = 2
"""Samples of a forward: with one, a dimension of samples may be left out unseen."""


def fake_copies(
    nets: Nets, device: torch.device | None = None, *, everywhere: bool = False
) -> tuple[FakeTensorMode, Nets]:
    """The nets on tensors without bytes, and the mode of these tensors.

    Args:
        device: of the copies of tensors on the meta device.
        everywhere: whether it is that of all copies.
    """
    with disable_current_modes():
        mode = GroupedProductsMode(allow_non_fake_inputs=True)
        copies: dict[int, Any] = {}
        with mode:
            for net in nets.values():
                for tensor in (*net.parameters(), *net.buffers()):
                    if id(tensor) not in copies:
                        copies[id(tensor)] = _fake(tensor, device if tensor.is_meta or everywhere else None)
        return mode, copy.deepcopy(nets, copies)


def _fake(tensor: Tensor, device: torch.device | None) -> Tensor:
    fake = fake_like(tensor, device)
    return nn.Parameter(fake, requires_grad=tensor.requires_grad) if isinstance(tensor, nn.Parameter) else fake


class WithAnswers(TorchDispatchMode):
    """Runs operators on tensors without bytes; questions that only data can answer are answered as in a trace."""

    def __init__(self) -> None:
        super().__init__()
        self._assumptions = Assumptions()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """What an operator gives."""
        return self.run(func, args, kwargs or {})

    def run(self, func: Any, args: Any, kwargs: Any) -> Any:
        """What an operator gives."""
        answer = answer_operator(func, args, kwargs, self._assumptions)
        return func(*args, **kwargs) if answer is NOT_HANDLED else answer


def structure_of(nets: Nets) -> tuple[Any, ...]:
    """What tells nets of a job apart: their modules, and the names and shapes of their parameters."""
    modules = [(name, path, type(part)) for name, net in nets.items() for path, part in net.named_modules()]
    shapes = [(name, path, p.shape) for name, net in nets.items() for path, p in net.named_parameters()]
    return (*modules, *shapes)


def in_copied_process(ask: Callable[[], Any]) -> Any:
    """What a function gives that runs a job's forward on tensors without bytes; it gives plain data.

    Raises:
        InputError: that of the function.
    """
    try:
        process = ForkedProcess(_Asked(ask))
    except (OSError, AttributeError):  # no process can be made
        return ask()
    try:
        value, words = process.call("answer").result()
    except NoResultError:
        return ask()
    finally:
        process.close()
    if words is not None:
        raise InputError(*words)
    return value


class _Asked:
    """What the copy of this process runs."""

    def __init__(self, ask: Callable[[], Any]) -> None:
        self._ask = ask

    def answer(self) -> tuple[Any, tuple[str, str, str] | None]:
        """What the function gives, or the words of its InputError."""
        torch.set_num_threads(1)  # threads of a kernel are not copied
        try:
            return self._ask(), None
        except InputError as error:
            return None, (error.seen, error.why, error.write)


def run_losses(
    job: Job, fakes: Nets, mode: FakeTensorMode, operators: WithAnswers, modules: AbstractContextManager[None]
) -> None:
    """Runs the losses of a job on copies of its nets, with a made-up batch of a few of the longest samples.

    Args:
        operators: sees all operators.
        modules: a context that sees the calls of modules.
    """
    with (
        disable_current_modes(), torch.enable_grad(), torch.random.fork_rng(devices=[]), mode, CPU, modules,
    ):  # fmt: skip
        batch = job.batch(shape_of(job, ITEMS * (job.longest or 1)))
        with operators:
            for turn in job.turns([]):
                turn.loss(fakes, batch, {})


def refusal(job: Job, where: str, error: Exception, write: str) -> InputError:
    """What is said of a job whose losses do not run so.

    Args:
        where: what was asked for.
        write: what to write instead.

    Raises:
        Exception: the error itself, where memory ran out.
    """
    if is_memory_failure(error):
        raise error
    why = f"its loss does not run on tensors without bytes, on which its nets are looked at: {describe(error)}"
    return InputError(f"{type(job).__name__} on {where}", why, write)
