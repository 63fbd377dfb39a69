"""Stages of a pipeline that other ranks hold: what they tell the traced rank before its first micro-batch.

A stage that was not given the shapes of its tensors runs a forward and a backward for them. It receives the shapes of
what the stage before sends, and of the gradients that the stage after sends, as messages. On the fake group there is no
other rank. So the stages of all other ranks are built in the traced process too, and run for their messages; nothing of
it is recorded. The stages of the traced rank run for their own shapes as in a real run, and that is recorded.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from memfit.device.virtual.fake_group import is_simulated, simulated_neighbours, unrecorded
from memfit.device.virtual.patching import replaced
from memfit.torch_compat.pipelining import (
    RECEIVE,
    SEND,
    WARM_UP,
    ask_for_shapes,
    run_backward_for_shapes,
    run_forward_for_shapes,
    schedule_class,
    send_all,
    stages_of,
)


@contextmanager
def other_stages(config: Any) -> Iterator[Callable[[Any], None]]:
    """Context in which a trainer of ``config`` runs one rank of its pipeline on the fake group; on a real group, and
    without a pipeline, it changes nothing.

    Yields:
        To be called with the trainer before it trains.
    """
    pipelined = config.model_spec.pipelining_fn
    with ExitStack() as stack:
        parts: list[OtherStages] = []

        def of_this_rank(model: Any, **how: Any) -> Any:
            made = pipelined(model, **how)
            if is_simulated():
                parts.append(OtherStages(pipelined, model, how, on_host=config.training.enable_cpu_offload))
                stack.enter_context(parts[0].answering())
            return made

        config.model_spec = dataclasses.replace(config.model_spec, pipelining_fn=of_this_rank if pipelined else None)
        yield lambda trainer: parts[0].follow(trainer) if parts else None


@dataclass
class _Stage:
    """A stage of another rank, with that rank's schedule."""

    schedule: Any
    stage: Any
    ran: str = ""


class OtherStages:
    """The stages of all other ranks of the pipeline, which are built when the first of them is asked.

    Args:
        pipelined: builds a rank's schedule and parts of the model, as ``ModelSpec.pipelining_fn``.
        model: the whole model, on the ``meta`` device.
        how: the other arguments of ``pipelined``.
        on_host: parameters are on the CPU between uses.
    """

    def __init__(self, pipelined: Callable[..., Any], model: Any, how: dict[str, Any], *, on_host: bool) -> None:
        self._pipelined, self._model, self._on_host = pipelined, model, on_host
        compile_config = dataclasses.replace(how["compile_config"], enable=False)  # shapes are the same
        self._how = {**how, "compile_config": compile_config, "ac_config": None}
        self._stages: dict[int, _Stage] = {}
        self._messages: dict[tuple[int, int], Any] = {}
        self._has_backward = True
        self._batch: tuple[Any, Any, Any] = (None, None, None)
        self._loss_kwargs: dict[str, Any] = {}

    @contextmanager
    def answering(self) -> Iterator[None]:
        """Context in which stages of the traced rank get what those of other ranks tell them."""
        from torch.distributed.pipelining import PipelineStage

        def send(stage: Any, message: Any, to: int) -> None:
            self._messages[stage.stage_index, to] = message

        def receive(stage: Any, source: int) -> Any:
            if (source, stage.stage_index) not in self._messages:
                with unrecorded():
                    self._run(source, "forward" if source < stage.stage_index else "backward")
            return self._messages[source, stage.stage_index]

        def begin(schedule: Any, stages: Any, has_backward: bool, *rest: Any) -> None:
            self._messages.clear()
            self._has_backward = has_backward
            for other in self._stages.values():
                other.ran = ""
            ask_for_shapes(schedule, stages, has_backward)

        with (
            simulated_neighbours(), replaced(schedule_class(), **{WARM_UP: begin}),
            replaced(PipelineStage, **{SEND: send, RECEIVE: receive}),
        ):  # fmt: skip
            yield

    def follow(self, trainer: Any) -> None:
        """Notes what the trainer gives to its schedule: a rank with neither the first nor the last stage gives neither
        tokens nor labels."""
        process, schedule = trainer.post_dataloading_process, trainer.pp_schedule

        def processed(*args: Any, **kwargs: Any) -> Any:
            self._batch = given = process(*args, **kwargs)
            return given

        def noting(run: Callable[..., Any]) -> Callable[..., Any]:
            def call(*args: Any, **kwargs: Any) -> Any:
                self._loss_kwargs = kwargs.get("loss_kwargs") or {}
                try:
                    return run(*args, **kwargs)
                finally:
                    self._batch, self._loss_kwargs = (None, None, None), {}

            return call

        trainer.post_dataloading_process = processed
        schedule.step, schedule.eval = noting(schedule.step), noting(schedule.eval)

    def _run(self, number: int, part: str) -> None:
        """Runs a stage of another rank for the messages of its forward, or of its backward."""
        if not self._stages:
            self._build()
        other = self._stages[number]
        inputs, labels, kwargs = self._batch
        if not other.ran:
            run_forward_for_shapes(other.stage, (inputs,), kwargs, self._has_backward)
            other.ran = "forward"
        if part == "backward" and other.ran == "forward":
            run_backward_for_shapes(other.schedule, other.stage, labels, self._loss_kwargs)
            other.ran = "backward"

    def _build(self) -> None:
        mesh = self._how["parallel_dims"].get_mesh("pp")
        own = mesh.get_local_rank()
        for place in range(mesh.size()):
            if place != own:
                for stage in self._of_rank(mesh, place):
                    self._stages[stage.stage.stage_index] = stage
        self._model = None

    def _of_rank(self, mesh: DeviceMesh, place: int) -> list[_Stage]:
        """The stages of one rank of the pipeline, with parameters."""
        rank_in, rank_of, group = DeviceMesh.get_local_rank, dist.get_rank, mesh.get_group()

        def local_rank(self: DeviceMesh, *args: Any, **kwargs: Any) -> int:
            return place if self == mesh else rank_in(self, *args, **kwargs)

        def rank(asked: Any = None) -> int:
            return place if asked is group else rank_of(asked)

        loss = copy.copy(self._how["loss_fn"])
        with replaced(DeviceMesh, get_local_rank=local_rank), replaced(dist, get_rank=rank):
            schedule, parts, _, has_last = self._pipelined(self._model, **{**self._how, "loss_fn": loss})
        device = self._how["device"]
        for part in parts:
            part.to_empty(device="cpu" if self._on_host else device)
            with torch.no_grad():
                part.init_weights(buffer_device=device if self._on_host else None)
            part.train()
        if has_last and hasattr(
            loss, "set_lm_head"
        ):  # as the trainer gives the head to a loss that computes logits itself
            loss.set_lm_head(parts[-1].lm_head)
            parts[-1]._skip_lm_head = True
        stages = stages_of(schedule)
        for stage in stages:
            send_all(stage)
        return [_Stage(schedule, stage) for stage in stages]
