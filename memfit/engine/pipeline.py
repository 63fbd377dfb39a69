"""Pipeline parallelism: each rank holds a stage of the trained nets, and micro-batches pass through the stages.

torch's own schedules run them (``torch.distributed.pipelining``). A schedule's micro-batches are those of a window, in
their order; where their shapes differ, those of one shape that follow each other are one schedule. All stages have a
window's batches and run the job's loss as far as their stage: ``stage_forward``.

On a mesh of ``pp`` x ``dp_shard`` ranks each stage is sharded over the ranks that hold it (``fully_shard``), each of
which has samples of its own. A schedule gathers a stage's parameters once and scatters its gradients once, after its
last backward, so that a rank holds both whole within a schedule. torchtitan does the same: gathering again in
every micro-batch would be a collective that nothing hides.

On ``pp`` x ``dp_replicate`` ranks each stage has replicas, with samples of their own; the gradients of a stage are
summed over them once a window, after its last backward, as under data parallelism (``Ddp``). Where replicas are sharded
too, ``fully_shard`` sums what it has scattered over them (HSDP).

On ``pp`` x ``tp`` ranks the layers of each stage are cut (``cut_layers``). A rank sends to, and receives from, the rank
of the next stage and of the one before that has its place among the ``tp`` ranks; what passes is whole on each of them.

On ``pp`` x ``dp_shard_in_ep`` ranks those of one stage send each other the tokens of its experts.

On ``pp`` x ``cp`` ranks each rank of a stage computes its part of the sequences of a schedule's micro-batches, within
one ``context_parallel`` around the whole schedule, as torchtitan has it. Stages are sharded over them, as over those of
``dp_shard``.

Left out: turns of several nets, fp16 (each stage would scale its gradients by itself), parameters that stages share,
tokens that are divided between stages (``sequence_parallel``).
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from memfit.blocks import find_module
from memfit.engine.collectives import gather, is_fake
from memfit.engine.context_parallel import check_divides_sequences
from memfit.engine.expert_parallel import EXPERTS
from memfit.engine.fsdp2 import REPLICAS, Fsdp2, reshard, scale_gradients, total_norm, unsharded_gradients
from memfit.engine.pipeline_cut import STAGES_OF_RANK, cut_into_stages
from memfit.engine.refusals import check_shared
from memfit.engine.sharded_reads import sharded_reads
from memfit.engine.sharded_units import check_units
from memfit.engine.single import copied
from memfit.engine.stage_forward import StageForward
from memfit.engine.stage_module import StageInput, StageModule, divided, shape_changes, without_wrapping
from memfit.engine.stage_state import StageState
from memfit.engine.tensor_parallel import TENSOR
from memfit.errors import InputError
from memfit.job import Job, Nets, is_trained
from memfit.mesh import SHARDING, TOKENS, dimensions_inside
from memfit.torch_compat.attributes import local_tensor
from memfit.torch_compat.distributed import complete_cpu_streams
from memfit.torch_compat.pipelining import check_pipelining, in_schedules, run_schedule

PIPELINE = "pp"
"""The dimension of a mesh of ranks that hold the stages of a pipeline."""


@dataclass(kw_only=True)
class _Stages:
    """What an engine learns of the nets that it was given."""

    forward: StageForward | None = None
    state: StageState | None = None
    modules: tuple[StageModule, ...] = ()
    of_whole_nets: dict[str, list[nn.Module]] = field(default_factory=dict)
    sent_bytes: int = 0


@dataclass(frozen=True, kw_only=True)
class Pipeline(Fsdp2):
    """The engine of stages.

    Attributes:
        schedule: one of ``STAGES_OF_RANK``.
        first_modules: the first module of each stage, as ``cut_into_stages`` takes them.
        device: of the rank.
    """

    device: torch.device
    schedule: str = "1f1b"
    first_modules: tuple[str, ...] = ()
    _own: _Stages = field(default_factory=_Stages, compare=False, repr=False)

    @property
    def stages(self) -> int:
        """Ranks over which the nets are cut."""
        return self.ranks_in(PIPELINE)

    @property
    def stage(self) -> int:
        """Its place among them, and the first stage that it holds: ranks of one stage are neighbours."""
        return self.rank // self._stage_ranks

    @property
    def held_stages(self) -> range:
        """Stages that it holds."""
        return range(self.stage, self.stages * STAGES_OF_RANK[self.schedule], self.stages)

    @property
    def data_rank(self) -> int:
        """Its place among the ranks of its stage; those that hold parts of a layer take the same samples."""
        return self.rank % self._stage_ranks // self._same_samples

    @property
    def data_world(self) -> int:
        """Ranks of each stage, or groups of them that hold parts of a layer."""
        return self._stage_ranks // self._same_samples

    @property
    def _stage_ranks(self) -> int:
        return self.world // self.stages

    @property
    def computes_losses(self) -> bool:
        """Whether it holds the last stage."""
        return self.stage == self.stages - 1

    @property
    def _group(self) -> dist.ProcessGroup:
        return self.mesh.get_group(PIPELINE)

    def place(self, job: Job, nets: Nets) -> Nets:
        """The trained nets without the modules of other ranks, and these sharded, with rank 0's values.

        Raises:
            InputError: the ranks built different nets, or a net cannot be cut or sharded.
        """
        self._cut_stages(job, nets)
        self._own.modules = self._sharded(job, nets)
        return nets

    def averages(self, job: Job, nets: Nets) -> Nets:
        """Copies of what the rank holds, sharded as that is."""
        self._cut_stages(job, nets)
        copies = copied(nets)
        self._sharded(job, copies)
        return copies

    def check(self, job: Job, nets: Nets, optimizers: Mapping[str, Optimizer]) -> None:
        """Raises InputError where an optimizer or a window needs more than the stage."""
        super().check(job, nets, optimizers)
        self.state.check(nets, optimizers)
        if job.precision == "fp16":
            why = "each stage would scale its gradients by itself"
            raise InputError(f"precision=fp16 on pp={self.stages}", why, "write precision=bf16")
        turns = job.turns(list(optimizers))
        if len(turns) > 1:
            why = f"a window has {len(turns)} turns, and a pipeline runs one loss"
            raise InputError(f"{type(job).__name__}.turns() on pp={self.stages}", why, "leave pp out of the mesh")

    def _cut_stages(self, job: Job, nets: Nets) -> None:
        if self._own.forward is not None:
            return
        check_pipelining()
        check_shared(job, self.name)
        if self.context_ranks > 1:
            check_divides_sequences(job)
        complete_cpu_streams()
        self._replicas.place(job, nets)
        self._own.state = StageState.of(job, nets, self._group)
        count = self.stages * STAGES_OF_RANK[self.schedule]
        cut = cut_into_stages(job, nets, count, f"pp={self.stages}", self.first_modules, self.device)
        for rank, bounds in enumerate(gather(self, cut.bounds)):
            if bounds != cut.bounds:
                seen, why = f"rank {rank} on pp={self.stages}", "it cuts the nets at other modules than another rank"
                raise InputError(seen, why, "let batch(self, shape) and loss do the same on every rank")
        self._cut(job, {name: net for name, net in nets.items() if is_trained(net)}, nets)
        if any(p.is_meta for net in nets.values() for p in net.parameters()):
            self._own.of_whole_nets = {name: list(net.modules()) for name, net in nets.items()}
        self._own.forward = StageForward(nets, cut, self.held_stages)
        if any(self.ranks_in(name) > 1 for name in (TENSOR, EXPERTS, TOKENS)):
            gc.collect()  # experts that are cut or divided hold themselves, also those of other stages

    def _sharded(self, job: Job, nets: Nets) -> tuple[StageModule, ...]:
        """The modules of each stage that the rank holds, over the ranks that hold the same."""
        forward = self._own.forward
        assert forward is not None
        modules = []
        for stage in self.held_stages:
            paths = [forward.cut.paths[number] for number in forward.cut.modules_of(stage)]
            module = StageModule(forward, stage, [find_module(nets, path) for path in paths])
            if self._is_sharded:
                check_units(module, {f"held.{i}": path for i, path in enumerate(paths)})
                self._shard(job, module, reshard_after_forward=False)
            modules.append(module)
        return tuple(modules)

    def take_whole_modules(self) -> dict[str, list[nn.Module]]:
        """Of nets that were built without values, by net all modules in their order, those of other stages too. They
        are given once, so that nothing holds them longer."""
        given, self._own.of_whole_nets = self._own.of_whole_nets, {}
        return given

    @property
    def state(self) -> StageState:
        """The nets' state over all stages."""
        assert self._own.state is not None
        return self._own.state

    def run_stages(
        self,
        inputs: Sequence[StageInput],
        device: torch.device,
        after: Callable[[], None] | None = None,
        within: Callable[[Sequence[StageInput]], AbstractContextManager[None]] = lambda inputs: nullcontext(),
    ) -> None:
        """Runs the micro-batches through all stages; every rank calls it with as many.

        Args:
            within: a context for the forwards and backwards of some of them.
            after: called after each forward, whose backward then runs; None: there is none.

        Raises:
            InputError: the nets' forward cannot be cut so.
        """
        begins = set(shape_changes(inputs))
        if self.data_world > 1:  # a schedule gathers and scatters, so that all ranks of a stage have the same ones
            begins = {begin for rank in gather(self, tuple(begins)) for begin in rank}
        for same in divided(inputs, begins, partial(in_schedules, self.schedule, ranks=self.stages)):
            with within(same), without_wrapping(), ExitStack() as running:
                for module in self._own.modules:
                    module.probe(same)
                    running.enter_context(module.running(same, after))
                stages = [module.scheduled(same[0].key) for module in self._own.modules]
                passed = [tensor for stage in stages for tensor in (stage.received, stage.sent) if tensor is not None]
                self._own.sent_bytes = max((tensor.nbytes for tensor in passed), default=0)
                run_schedule(
                    self.schedule, stages, len(same), ranks=self.stages, device=device, group=self._group,
                    trains=after is not None,
                )  # fmt: skip
        if after is None:
            reshard(self._modules)

    @property
    def sent_bytes(self) -> int:
        """Bytes of the largest tensor that stages of this rank passed on for a micro-batch of the last schedule."""
        return self._own.sent_bytes

    @property
    def _modules(self) -> Nets:
        return {f"stage {module.stage}": module for module in self._own.modules}

    def _over_stages(self, number: int) -> int:
        """The sum; where ranks are simulated, the other stages are taken to have one."""
        if is_fake(self):
            return number + 1
        numbers: list[Any] = [None] * self.stages
        dist.all_gather_object(numbers, number, group=self._group)
        return sum(numbers)

    def of_last_stage(self, value: Any) -> Any:
        """The last stage's value, on every rank of the pipeline; all call it."""
        values: list[Any] = [None] * self.stages
        dist.all_gather_object(values, value, group=self._group)
        return values[-1]

    @contextmanager
    def accumulating(self, nets: Nets, last: bool, shared: bool = True) -> Iterator[None]:
        """Schedules run the backwards, and scatter gradients.

        Raises:
            InputError: as ``sharded_reads`` raises it.
        """
        with sharded_reads(nets, dimensions_inside(self.ranks_in)):
            yield

    def categorised(self, nets: Nets) -> Iterator[tuple[Tensor, str]]:
        """Gradients that a rank holds whole, until they are scattered."""
        return ((gradient, "gradients") for gradient in unsharded_gradients(self._modules))

    def clip(self, parameters: Sequence[nn.Parameter], max_norm: float) -> Tensor:
        """Clips by the norm of all stages."""
        square = total_norm(parameters).float().square()
        dist.all_reduce(square, group=self._group)
        norm = square.sqrt()
        scale_gradients(parameters, max_norm, norm)
        return norm

    def weights(self, net: nn.Module) -> dict[str, Tensor]:
        """Gathers a net's weights from the stages."""
        return self.state.gathered(super().weights(net))

    def share_buffers(self, nets: Nets) -> None:
        """Each stage has its own running statistics: those of the first of its ranks."""
        groups = [self.mesh.get_group(name) for name in (REPLICAS, *SHARDING) if self.ranks_in(name) > 1]
        for net in nets.values():
            if is_trained(net):
                for buffer in net.buffers():
                    for group in groups:
                        dist.broadcast(local_tensor(buffer), group=group, group_src=0)

    def full_gradients(self, parameters: Mapping[str, nn.Parameter]) -> dict[str, Tensor]:
        """Those of all stages."""
        return self.state.gathered(super().full_gradients(parameters))

    def full_weights(self, parameters: Mapping[str, nn.Parameter]) -> dict[str, Tensor]:
        """Those of all stages."""
        return self.state.gathered(super().full_weights(parameters))

    def put_state(
        self,
        nets: Nets,
        optimizers: Mapping[str, Optimizer],
        state: Mapping[str, Any],
        stepped: Mapping[str, Sequence[nn.Parameter]],
    ) -> None:
        """Each rank keeps what its stage holds."""
        super().put_state(nets, optimizers, self.state.part(nets, optimizers, state), stepped)

    def state_of_parts(self, nets: Nets, optimizers: Mapping[str, Optimizer]) -> dict[str, Any]:
        """What this rank holds, with the groups of optimizers as on one device."""
        return self.state.with_whole_groups(super().state_of_parts(nets, optimizers))

    def load_state_of_parts(self, nets: Nets, optimizers: Mapping[str, Optimizer], state: Mapping[str, Any]) -> None:
        """Takes over what was read, whose groups of optimizers are those of one device."""
        super().load_state_of_parts(nets, optimizers, self.state.with_own_groups(nets, state))
