"""DeepSpeed's ZeRO: the optimizer's state is divided among ranks (stage 1), gradients too (2), and weights (3).

DeepSpeed's own optimizer classes around the job's one optimizer, told where a window's last micro-batch ends. Weights
become parts of one flat tensor for each group of the optimizer; each rank has a copy of its part, which is stepped, and
gathers the others'. Gradients are sums over ranks: DeepSpeed's averaging is switched off, and nothing is divided by a
number of micro-batches.

Stage 1 keeps gradients whole until the window's end, as data parallelism does. Stages 2 and 3 reduce them after every
micro-batch, so all ranks run as many. Stage 3 has means over ranks at the window's end, which are made sums.

Left out: several optimizers or turns, float16's scaled losses, optimizers whose step of a part is another than that of
the whole; ranks of one window whose batches use different parameters.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from memfit.engine import deepspeed
from memfit.engine.collectives import gather
from memfit.engine.container_sync import ContainerSync
from memfit.engine.ddp import Ddp
from memfit.engine.refusals import check_contiguous, check_elementwise
from memfit.engine.single import copied
from memfit.engine.zero_full_state import Divided
from memfit.engine.zero_partition import partition_parameters
from memfit.engine.zero_parts_state import ZeroPartsState
from memfit.errors import InputError
from memfit.job import Job, Nets, Turn, is_trained
from memfit.torch_compat.attributes import own_parameters

REBUILT = ("Adagrad",)
"""Optimizers that DeepSpeed makes anew, with one learning rate for all groups (``initialize_optimizer_states``)."""


@dataclass(frozen=True, kw_only=True)
class Zero(ZeroPartsState):
    """The engine of DeepSpeed's ZeRO."""

    @property
    def name(self) -> str:
        """zero1, zero2 or zero3."""
        return f"zero{self.stage}"

    @property
    def syncs_in_backward(self) -> bool:
        """Stage 1 reduces after the window, unless it overlaps that with the last backward."""
        return self.stage > 1 or self.choices.overlap_comm

    @property
    def syncs_in_step(self) -> bool:
        """Stepped weights are gathered."""
        return True

    @property
    def sharded_state(self) -> bool:
        """The optimizer's state, at least."""
        return True

    @property
    def parts_on_host(self) -> bool:
        """Whether stage 3's parts wait on the host."""
        return self.choices.offload_param

    @property
    def _replicas(self) -> Ddp:
        """What is not divided is as under data parallelism."""
        return Ddp(rank=self.rank, world=self.world, mesh=self.mesh)

    def place(self, job: Job, nets: Nets) -> Nets:
        """Gives every rank the parameters and buffers of rank 0.

        Raises:
            InputError: the ranks built different nets, or they cannot be trained so.
        """
        if job.precision == "fp16":
            raise InputError(
                f"precision=fp16 on --engine {self.name}",
                "its scaled losses are undone in whole gradients, which DeepSpeed does not keep",
                "write precision=bf16, or --engine ddp",
            )
        return self._replicas.place(job, nets)

    def averages(self, job: Job, nets: Nets) -> Nets:
        """Copies on rank 0; in stage 3 every rank holds the part of each copy that it holds of the weights."""
        if self.stage < 3:
            return self._replicas.averages(job, nets)
        self._replicas.place(job, nets)
        copies = copied(nets)
        for average in copies.values():
            partition_parameters(
                average, self.rank, self.world, torch.device("cpu") if self.choices.offload_param else None
            )
        return copies

    def check(self, job: Job, nets: Nets, optimizers: Mapping[str, Optimizer]) -> None:
        """Raises InputError where DeepSpeed cannot carry these optimizers or turns."""
        self.check_stepped(nets, optimizers, job.turns(list(optimizers)))

    def check_stepped(self, nets: Nets, optimizers: Mapping[str, Optimizer], turns: Sequence[Turn]) -> None:
        """Raises InputError where DeepSpeed cannot carry these optimizers of these nets, which these turns step."""
        if len(optimizers) > 1 or len(turns) > 1:
            what = f"optimizers {', '.join(optimizers)}" if len(optimizers) > 1 else f"{len(turns)} turns in a window"
            raise InputError(
                f"{what} on --engine {self.name}",
                "DeepSpeed reduces every gradient that a backward makes, the other turns' too",
                "write --engine ddp or --engine fsdp2",
            )
        ((name, optimizer),) = optimizers.items()
        check_elementwise(name, optimizer, self.name, "a flat part of all parameters", but=REBUILT)
        for path, parameter in _held(nets):
            if parameter.dtype != torch.float32:
                raise InputError(
                    f"parameter {path} on --engine {self.name}",
                    f"DeepSpeed would step a float32 copy of {parameter.dtype}, which learns otherwise",
                    "train float32 parameters (precision=bf16 computes in bfloat16), or write --engine ddp",
                )
            if self.stage == 3 and parameter.dim() == 0:
                raise InputError(
                    f"parameter {path} on --engine zero3",
                    "it is a single number, which DeepSpeed does not cut",
                    "make it a tensor of shape (1,), or write --engine zero2",
                )
            if self.stage == 3:
                check_contiguous(path, parameter, self.name)

    def divide(self, nets: Nets, optimizers: Mapping[str, Optimizer]) -> None:
        """DeepSpeed takes over the optimizer, whose groups then hold this rank's flat part."""
        (optimizer,) = optimizers.values()
        numbered = [
            (p, n) for n, group in enumerate(optimizer.param_groups) for p in group["params"] if p.requires_grad
        ]
        names = {p: f"{net}.{path}" for net, module in nets.items() for path, p in module.named_parameters()}
        own = {p: names[p] for p, _ in numbered}
        if self.stage == 3:
            trained = nn.ModuleDict({name: net for name, net in nets.items() if is_trained(net)})
            zero = deepspeed.sharded(optimizer, trained, own, self.group, self.choices)
            for module in trained.modules():
                ContainerSync().watch(module)
        else:
            zero = deepspeed.partitioned(optimizer, own, self.group, self.choices, gradients=self.stage == 2)
        made = Divided(zero=zero, parameters=tuple(own), groups=tuple(n for _, n in numbered))
        for place, parameter in enumerate(own):
            parameter.register_post_accumulate_grad_hook(lambda _, place=place: made.used.add(place))
        self._made.append(made)

    @contextmanager
    def accumulating(self, nets: Nets, last: bool, shared: bool = True) -> Iterator[None]:
        """Tells DeepSpeed where a backward begins and ends, and whether it is the window's last.

        Raises:
            InputError: the backward of a turn that ranks do not share reached the nets that DeepSpeed steps.
        """
        zero = self._zero
        zero.clear_backward_seen_flag()
        with self._gathering():
            if not shared:
                yield
                return
            zero.set_gradient_accumulation_boundary(last)
            zero.enter_backward()
            try:
                yield
                if self.syncs_in_backward:
                    self._reduce(last)
                zero.backward_epilogue()
            finally:
                zero.exit_backward()

    @contextmanager
    def _gathering(self) -> Iterator[None]:
        """Stage 3: weights are gathered around their use inside."""
        if self.stage < 3:
            yield
            return
        zero = self._zero
        zero.parameter_offload.get_param_coordinator().reset_step()
        _gather_on_access(zero.module, True)
        try:
            yield
        finally:
            _gather_on_access(zero.module, False)

    def prepare(self, parameters: Sequence[nn.Parameter]) -> None:
        """Stage 1: the buffer of a reduction, and zeros where another rank has a gradient and this one has none."""
        if not self.syncs_in_backward:
            self._replicas.fill(parameters)
            self._zero.setup_buckets()

    def reduce(self, prepared: None) -> None:
        """Stage 1 reduces here; stage 2 has."""
        if not self.syncs_in_backward:
            self._zero.set_gradient_accumulation_boundary(True)
            self._reduce(last=True)

    def _reduce(self, last: bool) -> None:
        """Reduces gradients as ``DeepSpeedEngine.allreduce_gradients`` does."""
        if self.stage > 1:
            self._zero.overlapping_partition_gradients_reduce_epilogue()
        elif last:
            self._zero.reduce_gradients()
        if self.stage == 3 and last:
            torch._foreach_mul_(self.gradients(()), self.world)

    def gradients(self, parameters: Sequence[nn.Parameter]) -> list[Tensor]:
        """This rank's parts."""
        zero = self._zero
        if self.choices.offload_optimizer:
            return [part.grad for part in self.stepped(zero.optimizer) if part.grad is not None]
        return [gradient for parts in zero.averaged_gradients.values() for gradient in parts or ()]

    def clip(self, parameters: Sequence[nn.Parameter], max_norm: float) -> Tensor:
        """Clips by the norm of all parts of all ranks."""
        parts = self.gradients(parameters)
        square = torch.stack([torch.linalg.vector_norm(part) for part in parts]).square().sum()
        dist.all_reduce(square, group=self.group)
        norm = square.sqrt()
        if max_norm != math.inf:
            torch._foreach_mul_(parts, torch.clamp(max_norm / (norm + 1e-6), max=1.0))
        return norm

    def step(self, optimizer: Optimizer) -> None:
        """Steps this rank's part; then all ranks gather the others' parts.

        Raises:
            InputError: a parameter has no gradient, and DeepSpeed would change it all the same.
        """
        self._check_unused(optimizer)
        self._zero.step()

    def zero_grad(self, optimizer: Optimizer) -> None:
        """Lets go of everything that backwards have left in DeepSpeed's hands."""
        zero = self._zero
        self._made[0].used.clear()
        zero.zero_grad(set_to_none=True)
        if self.stage == 3:
            for bucket in zero.ipg_buckets.values():
                bucket.clear_params()
            zero.averaged_gradients.clear()
            return
        zero.micro_step_id = -1
        for bucket in zero.ipg_buckets.values():
            bucket.clear()
        zero.extra_large_param_to_reduce.clear()
        zero.params_already_reduced = [False] * len(zero.params_already_reduced)
        for parts in (zero.averaged_gradients, zero.all_grad_tensors):
            parts.clear()
        zero._release_ipg_buffers()

    def weights(self, net: nn.Module) -> dict[str, Tensor]:
        """Gathers a net's weights where they are cut."""
        return {name: self._full_value(value) for name, value in net.state_dict(keep_vars=True).items()}

    def parts(self, net: nn.Module) -> list[Tensor]:
        """The net's parameters: full in stages 1 and 2, this rank's parts in stage 3."""
        return [getattr(p, "ds_tensor", p).data for p in net.parameters()]

    def share_buffers(self, nets: Nets) -> None:
        """Running statistics of rank 0, as under data parallelism."""
        self._replicas.share_buffers(nets)

    @property
    def _zero(self) -> Any:
        return self._made[0].zero

    def _check_unused(self, optimizer: Optimizer) -> None:
        """A parameter without a gradient is stepped with zeros: decayed, and moved by what it has learnt before."""
        made = self._made[0]
        used = set[int]().union(*gather(self, sorted(made.used)))
        for place, (parameter, group) in enumerate(zip(made.parameters, made.groups, strict=True)):
            decays = optimizer.param_groups[group].get("weight_decay")
            if place not in used and (decays or place in made.ever):
                raise InputError(
                    f"parameter {made.zero.param_names[parameter]} on --engine {self.name}",
                    "no loss of this window uses it, and DeepSpeed would step it all the same",
                    "freeze it (requires_grad_(False)), or write --engine ddp",
                )
        made.ever |= used
        made.used.clear()


def _gather_on_access(nets: nn.Module, gathers: bool) -> None:
    """Whether a parameter that is read outside of its module's forward is gathered then, as ``DeepSpeedEngine.forward``
    has it."""
    for module in nets.modules():
        own_parameters(module)._in_forward = gathers  # type: ignore[attr-defined]


def _held(nets: Nets) -> Iterator[tuple[str, nn.Parameter]]:
    """(``net.path``, parameter) of what DeepSpeed is given: all of every trained net."""
    for name, net in nets.items():
        if is_trained(net):
            for path, parameter in net.named_parameters():
                yield f"{name}.{path}", parameter
