"""Pipeline parallelism: each rank holds a stage of the trained nets, and micro-batches pass through the stages.

torch's own schedules run them (``torch.distributed.pipelining``). A schedule's micro-batches are those of a window, in
their order; where their shapes differ, those of one shape that follow each other are one schedule. All stages have a
window's batches and run the job's loss as far as their stage: ``stage_forward``.

Left out: turns of several nets, fp16 (each stage would scale its gradients by itself), parameters that stages share.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from memfit.engine.collectives import gather
from memfit.engine.fsdp2 import Fsdp2
from memfit.engine.pipeline_cut import cut_into_stages
from memfit.engine.refusals import check_shared
from memfit.engine.single import copied
from memfit.engine.stage_forward import Compute, StageForward, StageShapes
from memfit.engine.stage_state import StageState
from memfit.errors import InputError
from memfit.job import Job, Nets
from memfit.torch_compat.pipelining import check_pipelining, run_schedule

PIPELINE = "pp"
"""The dimension of a mesh of ranks that hold the stages of a pipeline."""


@dataclass(frozen=True, kw_only=True)
class StageInput:
    """One micro-batch of a schedule.

    Attributes:
        key: what the shapes that stages pass on follow from.
        probe: the forward, for the shapes alone.
        compute: the forward.
    """

    key: Hashable
    probe: Compute
    compute: Compute


@dataclass(kw_only=True)
class _Stage:
    """What an engine learns of the nets that it was given."""

    forward: StageForward | None = None
    state: StageState | None = None
    shapes: dict[Hashable, StageShapes] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Pipeline(Fsdp2):
    """The engine of stages.

    Attributes:
        schedule: 1f1b or gpipe.
    """

    schedule: str = "1f1b"
    _stage: _Stage = field(default_factory=_Stage, compare=False, repr=False)

    @property
    def stages(self) -> int:
        """Stages of the pipeline."""
        return self.ranks_in(PIPELINE)

    @property
    def stage(self) -> int:
        """This rank's stage: ranks of one stage are neighbours."""
        return self.rank // self.data_world

    @property
    def data_rank(self) -> int:
        """Its place among the ranks of its stage."""
        return self.rank % self.data_world

    @property
    def data_world(self) -> int:
        """Ranks of each stage."""
        return self.world // self.stages

    @property
    def is_last_stage(self) -> bool:
        """Whether it computes losses."""
        return self.stage == self.stages - 1

    @property
    def _group(self) -> dist.ProcessGroup:
        return self.mesh.get_group(PIPELINE)

    def place(self, job: Job, nets: Nets) -> Nets:
        """The trained nets without the modules of other stages, with rank 0's values.

        Raises:
            InputError: the ranks built different nets, or a net cannot be cut.
        """
        self._cut_stages(job, nets)
        return nets

    def averages(self, job: Job, nets: Nets) -> Nets:
        """Copies of the stage."""
        self._cut_stages(job, nets)
        return copied(nets)

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
        if self._stage.forward is not None:
            return
        check_pipelining()
        check_shared(job, self.name)
        self._replicas.place(job, nets)
        self._stage.state = StageState.of(job, nets, self._group)
        cut = cut_into_stages(job, nets, self.stage, self.stages)
        for rank, bounds in enumerate(gather(self, cut.bounds)):
            if bounds != cut.bounds:
                seen, why = f"rank {rank} on pp={self.stages}", "it cuts the nets at other modules than another rank"
                raise InputError(seen, why, "let batch(self, shape) and loss do the same on every rank")
        self._stage.forward = StageForward(nets, cut)

    @property
    def state(self) -> StageState:
        """The nets' state over all stages."""
        assert self._stage.state is not None
        return self._stage.state

    def run_stages(
        self, inputs: Sequence[StageInput], device: torch.device, after: Callable[[], None] | None = None
    ) -> None:
        """Runs the micro-batches through all stages; every rank calls it with as many.

        Args:
            after: called after each forward, whose backward then runs; None: there is none.

        Raises:
            InputError: the nets' forward cannot be cut so.
        """
        forward = self._stage.forward
        assert forward is not None
        for micro_batch in inputs:
            if micro_batch.key not in self._stage.shapes:
                self._stage.shapes[micro_batch.key] = forward.shapes(micro_batch.probe)
        for key, group in groupby(inputs, key=lambda micro_batch: micro_batch.key):
            same, shapes = list(group), self._stage.shapes[key]
            module = _StageModule(forward, [micro_batch.compute for micro_batch in same], after)
            with _without_wrapping():
                run_schedule(
                    self.schedule, module, len(same), stage=self.stage, stages=self.stages, device=device,
                    group=self._group, received=shapes.received, sent=shapes.sent, trains=after is not None,
                )  # fmt: skip

    def of_last_stage(self, value: Any) -> Any:
        """The last stage's value, on every rank of the pipeline; all call it."""
        values: list[Any] = [None] * self.stages
        dist.all_gather_object(values, value, group=self._group)
        return values[-1]

    @contextmanager
    def accumulating(self, nets: Nets, last: bool, shared: bool = True) -> Iterator[None]:
        """Does nothing: schedules run the backwards."""
        yield

    def clip(self, parameters: Sequence[nn.Parameter], max_norm: float) -> Tensor:
        """Clips by the norm of all stages."""
        norm = torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
        square = (norm.full_tensor() if isinstance(norm, DTensor) else norm).float().square()
        dist.all_reduce(square, group=self._group)
        norm = square.sqrt()
        torch.nn.utils.clip_grads_with_norm_(parameters, max_norm, norm)
        return norm

    def weights(self, net: nn.Module) -> dict[str, Tensor]:
        """Gathers a net's weights from the stages."""
        return self.state.gathered(super().weights(net))

    def share_buffers(self, nets: Nets) -> None:
        """Each stage has its own."""

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


class _StageModule(nn.Module):
    """What a schedule calls: one micro-batch's forward as far as the stage goes."""

    def __init__(self, forward: StageForward, computes: Sequence[Compute], after: Callable[[], None] | None) -> None:
        super().__init__()
        self._forward_of_stage, self._computes, self._after = forward, list(computes), after

    def forward(self, *received: Tensor, number: int) -> Any:
        """The hidden state that is sent, or the loss; a zero where a validation gives something else."""
        given = self._forward_of_stage.run(self._computes[number], received[0] if received else None)
        if self._after is not None:
            self._after()
        return given if isinstance(given, Tensor) else torch.zeros(())


@contextmanager
def _without_wrapping() -> Iterator[None]:
    """Raises what a schedule has wrapped in errors of its own, whose messages are of many lines.

    It is raised after they are gone: an error that came of itself would be a circle.
    """
    cause: BaseException | None = None
    try:
        yield
    except RuntimeError as error:
        if error.__cause__ is None:
            raise
        cause = error
        while type(cause) is RuntimeError and cause.__cause__ is not None:
            cause = cause.__cause__
    if cause is not None:
        raise cause
