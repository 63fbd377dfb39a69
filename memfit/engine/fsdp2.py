"""Fully sharded: each rank keeps a part of every parameter, its gradient and its optimizer's state (ZeRO's stage 3).

torch's ``fully_shard`` on the blocks of every trained net and on the net itself: a block's parameters are
gathered before its forward and its backward and dropped after them, and gradients are scattered as sums. A call of a
module of a block counts as a forward of the block where that does not run (``outside_calls``). Frozen nets
stay whole on every rank, buffers and single numbers too, whose gradients are summed over the ranks once a window. An
average of the weights is sharded as the weights are, on every rank.
On a mesh of ``dp_replicate`` x ``dp_shard`` ranks a parameter is sharded over ``dp_shard``, and its gradient is summed
over ``dp_replicate`` after it was scattered (HSDP). Replicas of layers that are cut need no shards: their gradients are
summed once a window, as under DDP. On ``tp`` ranks layers are cut first (``tensor_parallel``), on
``ep`` ranks experts are divided (``expert_parallel``), and on ``dp_shard_in_ep`` ranks too, over which all else is
sharded, with ``dp_shard``; those experts are sharded over ``dp_shard`` alone. ``cp`` ranks divide sequences
(``context_parallel``), and shard parameters as those of ``dp_shard`` do, with them.

Left out: ranks of one window whose batches use different parameters (FSDP2 then waits for collectives that never
come); parameters that are read without a call of a module that holds them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from memfit.blocks import has_forward
from memfit.engine.collectives import full_tensor
from memfit.engine.container_sync import ContainerSync
from memfit.engine.context_parallel import CONTEXT, check_divides_sequences, divide_sequences
from memfit.engine.ddp import Ddp
from memfit.engine.expert_parallel import EXPERTS, divide_experts, exchange_tokens, sending_experts
from memfit.engine.outside_calls import OutsideCalls
from memfit.engine.refusals import check_dtensor_step, check_shared
from memfit.engine.sharded_reads import sharded_reads
from memfit.engine.sharded_units import check_units, is_number, units
from memfit.engine.single import copied
from memfit.engine.tensor_parallel import TENSOR, cut_layers
from memfit.engine.torch_optim_mixin import TorchOptimMixin
from memfit.engine.torch_state_mixin import TorchStateMixin
from memfit.errors import InputError
from memfit.job import Job, Nets, is_trained
from memfit.mesh import OF_EXPERTS, SHARDING, TOKENS, dimensions_inside
from memfit.torch_compat.attributes import local_tensor, unsharded_gradient
from memfit.torch_compat.distributed import (
    complete_cpu_streams,
    fsdp_groups,
    joined_dimension,
    sum_gradients,
    with_joined,
)

SHARDS, REPLICAS = "dp_shard", "dp_replicate"
"""Dimensions of a mesh whose ranks have samples of their own: those that hold parts of one replica, and replicas."""
CUTS = (TENSOR, EXPERTS, "pp")
"""Dimensions of a mesh over which nets are cut before they are sharded."""


@dataclass(frozen=True, kw_only=True)
class Fsdp2(TorchOptimMixin, TorchStateMixin):
    """The engine of sharded nets, whose layers may be cut too.

    Attributes:
        sync_each_micro_batch: gradients are scattered after every micro-batch; False: they are summed whole on each
            rank and scattered once a window, which takes the memory of whole gradients and saves collectives.
        half_gather: parameters are gathered in the job's half type, and gradients scattered in float32. Half the
            bytes; rounds parameters that autocast would have read in float32 (norms' weights, embeddings).
        sequence_parallel: between layers that are cut, a rank has its part of the tokens.
        cpu_offload: parts of parameters, their gradients, the optimizers' state and steps, and averages are on the
            host; a unit's parameters are copied to the card for each gather, and its gradients back (torch's
            ``CPUOffloadPolicy``).
    """

    rank: int
    world: int
    mesh: DeviceMesh
    name: str = "fsdp2"
    syncs_in_backward: bool = True
    syncs_in_step: bool = False
    sharded_state: bool = True
    sync_each_micro_batch: bool = True
    half_gather: bool = False
    sequence_parallel: bool = False
    cpu_offload: bool = False

    @property
    def data_rank(self) -> int:
        """Ranks that hold parts of a layer or of a sequence are neighbours, and take the same samples."""
        return self.rank // self._same_samples

    @property
    def data_world(self) -> int:
        """Ranks, or groups of them that hold parts of a layer or of a sequence."""
        return self.world // self._same_samples

    @property
    def context_ranks(self) -> int:
        """Ranks that hold parts of a sequence."""
        return self.ranks_in(CONTEXT)

    @property
    def parts_on_host(self) -> bool:
        """Whether parts wait on the host."""
        return self.cpu_offload

    @property
    def _same_samples(self) -> int:
        return self.ranks_in(CONTEXT) * self.ranks_in(TENSOR) * self.ranks_in(EXPERTS)

    @property
    def stages(self) -> int:
        """Every rank runs forwards whole."""
        return 1

    def ranks_in(self, dimension: str) -> int:
        """Ranks of a dimension of the mesh; 1 where it has none of this name."""
        names = self.mesh.mesh_dim_names or ()
        return self.mesh.size(names.index(dimension)) if dimension in names else 1

    @property
    def _is_sharded(self) -> bool:
        """Whether ranks hold parts of a replica."""
        return any(self.ranks_in(name) > 1 for name in SHARDING)

    @property
    def _whole_replicas(self) -> Ddp | None:
        """The ranks that hold what this one holds; None: there are no others, or ``fully_shard`` sums over them."""
        if self.ranks_in(REPLICAS) == 1 or self._is_sharded:
            return None
        return Ddp(rank=self.data_rank, world=self.data_world, mesh=self.mesh[REPLICAS])

    @property
    def _sharding_dimensions(self) -> tuple[str, ...]:
        """Dimensions of the mesh that ``fully_shard`` is given; none where ranks hold whole replicas."""
        if self._whole_replicas is not None:
            return ()
        return tuple(name for name in self.mesh.mesh_dim_names or () if name not in CUTS)

    @property
    def _replicas(self) -> Ddp:
        """What is not sharded is as under data parallelism."""
        return Ddp(rank=self.rank, world=self.world, mesh=self.mesh)

    def place(self, job: Job, nets: Nets) -> Nets:
        """The trained nets sharded in place, with rank 0's values.

        Raises:
            InputError: the ranks built different nets, or a net cannot be sharded.
        """
        check_shared(job, self.name)
        if self.context_ranks > 1:
            check_divides_sequences(job)
        complete_cpu_streams()
        self._replicas.place(job, nets)
        trained = {name: net for name, net in nets.items() if is_trained(net)}
        for name, net in trained.items():
            if not has_forward(net):
                raise InputError(
                    f"net {name!r} on --engine fsdp2",
                    f"a {type(net).__name__} has no forward, which would gather its sharded parameters",
                    "write a module with a forward and call it in the loss, or write --engine ddp",
                )
            if self._sharding_dimensions:
                check_units(net, {"": name})
        self._cut(job, trained, nets)
        for net in trained.values():
            self._shard(job, net)
        return nets

    def averages(self, job: Job, nets: Nets) -> Nets:
        """Sharded copies, a part on every rank."""
        self._replicas.place(job, nets)
        copies = copied(nets)
        self._cut(job, copies, nets)
        for average in copies.values():
            self._shard(job, average)
        return copies

    def check(self, job: Job, nets: Nets, optimizers: Mapping[str, Optimizer]) -> None:
        """Raises InputError where an optimizer's step on shards is not its step on whole parameters."""
        for name, optimizer in optimizers.items():
            check_dtensor_step(name, optimizer, self.name)

    def divide(self, nets: Nets, optimizers: Mapping[str, Optimizer]) -> None:
        """The optimizers were made of this rank's shards."""

    @contextmanager
    def accumulating(self, nets: Nets, last: bool, shared: bool = True) -> Iterator[None]:
        """Scatters gradients after this backward, or keeps them whole until the window's last one. A net that ran
        without a backward, such as a generator whose samples are judged, is then sharded again.

        Raises:
            InputError: as ``sharded_reads`` raises it.
        """
        for net in nets.values():
            if isinstance(net, FSDPModule):
                net.set_requires_gradient_sync(self.sync_each_micro_batch or last)
        with sharded_reads(nets, dimensions_inside(self.ranks_in)):
            yield
        for net in nets.values():
            if last and isinstance(net, FSDPModule):
                net.reshard()

    @contextmanager
    def divide_sequences(self, job: Job, nets: Nets, batches: Sequence[Any]) -> Iterator[list[Any]]:
        """The batches with a part of each sequence on ``cp`` ranks, else as they are."""
        if self.context_ranks == 1:
            yield list(batches)
            return
        with divide_sequences(job, nets, batches, self.mesh[CONTEXT], self._over_stages) as parts:
            yield parts

    def _over_stages(self, number: int) -> int:
        """The sum of a number over the stages of a pipeline; here there is one."""
        return number

    def categorised(self, nets: Nets) -> Iterator[tuple[Tensor, str]]:
        """Gradients that a rank holds whole, until they are scattered."""
        return ((gradient, "gradients") for gradient in unsharded_gradients(nets))

    def prepare(self, parameters: Sequence[nn.Parameter]) -> Any:
        """Buffers for the sums of gradients over replicas. Where they are sharded, the last backward has scattered all
        sums but those of single numbers."""
        if (replicas := self._whole_replicas) is not None:
            return [(replicas, replicas.prepare(parameters))]
        numbers = [parameter for parameter in parameters if is_number(parameter)]
        return [(ranks, ranks.prepare(numbers)) for ranks in self._ranks_with_samples()] if numbers else ()

    def reduce(self, prepared: Any) -> None:
        """Sums gradients over the ranks that have samples of their own, by dimension of the mesh."""
        for ranks, buffers in prepared:
            ranks.reduce(buffers)

    def gradients(self, parameters: Sequence[nn.Parameter]) -> list[Tensor]:
        """This rank's shards of the sums, as plain tensors: those of experts may be on another mesh."""
        return [local_tensor(gradient) for gradient in super().gradients(parameters)]

    def clip(self, parameters: Sequence[nn.Parameter], max_norm: float) -> Tensor:
        """Clips by the norm of all shards of all ranks."""
        if len(_by_mesh(parameters)) == 1:
            norm = torch.nn.utils.clip_grad_norm_(parameters, max_norm)
            return norm.full_tensor() if isinstance(norm, DTensor) else norm
        norm = total_norm(parameters)
        scale_gradients(parameters, max_norm, norm)
        return norm

    def parts(self, net: nn.Module) -> list[Tensor]:
        """This rank's shards of a net's parameters, as plain tensors: they may be on several meshes, or on none."""
        return [local_tensor(parameter) for parameter in net.parameters()]

    def weights(self, net: nn.Module) -> dict[str, Tensor]:
        """Gathers a net's weights from their shards."""
        return {key: full_tensor(value) for key, value in net.state_dict().items()}

    def share_buffers(self, nets: Nets) -> None:
        """Running statistics of rank 0, as under data parallelism."""
        self._replicas.share_buffers(nets)

    def _ranks_with_samples(self) -> list[Ddp]:
        """For each dimension of the mesh whose ranks have samples, or parts of sequences, of their own: those ranks."""
        every = self.mesh.mesh_dim_names or ()
        names = [name for name in every if name not in CUTS]
        if len(names) == len(every):
            return [self._replicas]
        meshes = [self.mesh[name] for name in names]
        return [Ddp(rank=mesh.get_local_rank(), world=mesh.size(), mesh=mesh) for mesh in meshes]

    def _cut(self, job: Job, nets: Nets, whole: Nets) -> None:
        """The layers cut over the tensor-parallel ranks, or the experts divided, before they are sharded."""
        if self.ranks_in(TENSOR) > 1:
            cut_layers(job, nets, self.mesh[TENSOR], whole=whole, sequence=self.sequence_parallel)
        if self.ranks_in(EXPERTS) > 1:
            cut = self.mesh[TENSOR, EXPERTS] if self.ranks_in(TENSOR) > 1 else None
            divide_experts(nets, self.mesh[EXPERTS], cut)
        if self.ranks_in(TOKENS) > 1:
            names = tuple(name for name in OF_EXPERTS if self.ranks_in(name) > 1)
            mesh = joined_dimension(self.mesh, names)
            both = (*(mesh.mesh_dim_names or ()), TENSOR)
            cut = self.mesh[both] if self.ranks_in(TENSOR) > 1 else None
            exchange_tokens(nets, mesh, ",".join(f"{name}={self.ranks_in(name)}" for name in names), cut)

    def _shard(self, job: Job, net: nn.Module, reshard_after_forward: bool | None = None) -> None:
        every, names = self.mesh.mesh_dim_names or (), self._sharding_dimensions
        if not names:
            return
        joined = tuple(name for name in names if name in SHARDING)
        if len(joined) > 1:
            mesh = with_joined(self.mesh, names, joined)
        else:
            mesh = self.mesh if names == every else self.mesh[names]
        policy = MixedPrecisionPolicy(cast_forward_inputs=False)
        if self.half_gather and job.precision != "fp32":
            half = torch.bfloat16 if job.precision == "bf16" else torch.float16
            policy = MixedPrecisionPolicy(param_dtype=half, reduce_dtype=torch.float32, cast_forward_inputs=False)
        place = CPUOffloadPolicy(pin_memory=mesh.device_type != "cpu") if self.cpu_offload else OffloadPolicy()
        shard = partial(
            fully_shard, mp_policy=policy, offload_policy=place, reshard_after_forward=reshard_after_forward
        )
        numbers = {parameter for parameter in net.parameters() if is_number(parameter)}
        experts = sending_experts(net)
        ignored = {p for module in experts for p in module.parameters()} if SHARDS not in names else set()
        shard = partial(shard, ignored_params=numbers | ignored) if numbers or ignored else shard
        if experts and SHARDS in names:
            over = self.mesh[tuple(name for name in names if name not in OF_EXPERTS)]
            for module in experts:
                shard(module, mesh=over)
                sum_gradients(module)
        for path in units(net):
            module = net.get_submodule(path)
            shard(module, mesh=mesh)
            ContainerSync().watch(module)
            sum_gradients(module)
        for module in [each for each in net.modules() if isinstance(each, FSDPModule)]:
            OutsideCalls(net, module).watch()


def total_norm(parameters: Sequence[nn.Parameter]) -> Tensor:
    """The norm of all gradients over all shards; parameters may be sharded over several meshes."""
    grads = [[p.grad for p in each if p.grad is not None] for each in _by_mesh(parameters)]
    norms = [full_tensor(torch.nn.utils.get_total_norm(each)) for each in grads if each]
    if len(norms) < 2:
        return norms[0] if norms else torch.tensor(0.0)
    return torch.linalg.vector_norm(torch.stack([norm.to(norms[0].device) for norm in norms]))


def scale_gradients(parameters: Sequence[nn.Parameter], max_norm: float, norm: Tensor) -> None:
    """Scales gradients, of which this is the norm, to at most ``max_norm``."""
    for each in _by_mesh(parameters):
        torch.nn.utils.clip_grads_with_norm_(each, max_norm, norm)


def _by_mesh(parameters: Sequence[nn.Parameter]) -> list[list[nn.Parameter]]:
    """Parameters by the mesh that they are sharded over: operators on lists take DTensors of one mesh alone."""
    by_mesh: dict[Any, list[nn.Parameter]] = {}
    for parameter in parameters:
        by_mesh.setdefault(parameter.device_mesh if isinstance(parameter, DTensor) else None, []).append(parameter)
    return list(by_mesh.values())


def reshard(nets: Nets) -> None:
    """Weights that a forward has gathered are parts again. The net's own outermost group stays whole after a forward,
    until a backward that an evaluation does not have."""
    for net in nets.values():
        for module in net.modules():
            if isinstance(module, FSDPModule):
                module.reshard()


def unsharded_gradients(nets: Nets) -> Iterator[Tensor]:
    """Gradients that a rank holds whole, until they are scattered."""
    for net in nets.values():
        for module in net.modules():
            if isinstance(module, FSDPModule):
                for group in fsdp_groups(module):
                    for parameter in group.fsdp_params:
                        held = unsharded_gradient(parameter)
                        if held is not None:
                            yield held
