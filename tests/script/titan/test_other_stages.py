"""The stages of other ranks tell a traced rank its shapes: pytest tests/script/titan/test_other_stages.py"""

import copy
from collections import defaultdict
from dataclasses import dataclass, field
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from memfit.device.virtual.fake_group import fake_world
from memfit.installation import release_number
from memfit.script.titan.other_stages import other_stages

pytestmark = pytest.mark.skipif(
    release_number(torch.__version__) < (2, 13), reason="stages tell each other shapes from torch 2.13 on"
)
WIDTHS = (2, 3, 5, 7, 4, 6, 1)
"""Of what passes between six stages, the first one's input and the last one's output included."""
MICRO_BATCHES, ROWS = 6, 3


LAST = len(WIDTHS) - 2
"""The number of the last stage."""


def stages_of(schedule: str, place: int, ranks: int) -> list[int]:
    """The stages that a rank holds."""
    return [place, LAST - place] if schedule == "ZBVZeroBubble" else list(range(place, LAST + 1, ranks))


@dataclass
class Options:
    enable: bool = True


@dataclass
class Spec:
    pipelining_fn: Any


class Part(nn.Linear):
    """One stage, which notes the shapes that it gets in its forward and backward."""

    shapes: list[tuple[int, ...]]
    gradients: list[tuple[int, ...]]

    def init_weights(self, buffer_device: Any = None) -> None:
        self.reset_parameters()
        self.shapes, self.gradients = [], []

    def forward(self, x: Tensor) -> Tensor:
        self.shapes.append(tuple(x.shape))
        out = super().forward(x)
        if out.requires_grad:
            out.register_hook(lambda gradient: self.gradients.append(tuple(gradient.shape)))
        return out


@dataclass
class Pipelines:
    """Builds the stages of a rank, as a model of torchtitan does, and notes for which ranks."""

    schedule: str
    built: list[int] = field(default_factory=list)
    compiled: dict[int, bool] = field(default_factory=lambda: defaultdict(bool))

    def __call__(
        self, model: Any, *, parallel_dims: Any, compile_config: Options, ac_config: Any, device: Any, loss_fn: Any
    ) -> Any:
        from torch.distributed import pipelining
        from torch.distributed.pipelining.schedules import get_schedule_class

        mesh = parallel_dims.get_mesh("pp")
        place, ranks = mesh.get_local_rank(), mesh.size()
        numbers = stages_of(self.schedule, place, ranks)
        parts = [copy.deepcopy(model[number]) for number in numbers]
        stages = [
            pipelining.PipelineStage(part, number, LAST + 1, device, group=mesh.get_group())
            for part, number in zip(parts, numbers, strict=True)
        ]
        self.built.append(place)
        self.compiled[place] = compile_config.enable
        schedule: Any = get_schedule_class(self.schedule)
        several: Any = stages if len(stages) > 1 else stages[0]
        made = schedule(several, n_microbatches=MICRO_BATCHES, loss_fn=loss_fn, scale_grads=False)
        return made, parts, 0 in numbers, LAST in numbers


def run(schedule: str, rank: int, ranks: int) -> tuple[Pipelines, list[int], Any]:
    """One step of a rank on the fake group: what was built, the rank's stages, and their parts."""
    pipelines = Pipelines(schedule)
    config = SimpleNamespace(model_spec=Spec(pipelines), training=SimpleNamespace(enable_cpu_offload=False))
    inputs, labels = torch.randn(MICRO_BATCHES * ROWS, WIDTHS[0]), torch.randn(MICRO_BATCHES * ROWS, WIDTHS[-1])
    with fake_world(ranks, rank=rank), other_stages(config) as follow:
        mesh = init_device_mesh("cpu", (ranks,), mesh_dim_names=("pp",))
        with torch.device("meta"):
            model = nn.ModuleList(Part(a, b) for a, b in pairwise(WIDTHS))
        made, parts, has_first, has_last = config.model_spec.pipelining_fn(
            model, parallel_dims=SimpleNamespace(get_mesh=lambda name: mesh), compile_config=Options(), ac_config=None,
            device=torch.device("cpu"), loss_fn=lambda out, label: ((out - label) ** 2).sum(),
        )  # fmt: skip
        for part in parts:
            part.to_empty(device="cpu")
            part.init_weights()
        trainer = SimpleNamespace(
            post_dataloading_process=lambda: (inputs[:ROWS], labels[:ROWS], {}), pp_schedule=made,
        )  # fmt: skip
        follow(trainer)
        trainer.post_dataloading_process()
        made.step(*((inputs,) if has_first else ()), target=labels if has_last else None, return_outputs=False)
    return pipelines, stages_of(schedule, rank, ranks), parts


@pytest.mark.parametrize(
    ("schedule", "ranks"),
    [("1F1B", 6), ("GPipe", 6), ("Interleaved1F1B", 3), ("InterleavedZeroBubble", 3), ("ZBVZeroBubble", 3)],
)
def test_every_rank_s_stages_get_tensors_of_the_neighbours_shapes(schedule: str, ranks: int) -> None:
    for rank in range(ranks):
        pipelines, stages, parts = run(schedule, rank, ranks)
        assert pipelines.built[0] == rank
        assert sorted(pipelines.built) == list(range(ranks))
        assert [place for place, compiled in pipelines.compiled.items() if compiled] == [rank]
        for number, part in zip(stages, parts, strict=True):
            assert part.shapes == [(ROWS, WIDTHS[number])] * (1 + MICRO_BATCHES), "once for its own shapes"
            assert set(part.gradients) == {(ROWS, WIDTHS[number + 1])}
            assert part.weight.grad is not None


def test_without_a_fake_group_nothing_is_changed() -> None:
    made = object()
    config = SimpleNamespace(model_spec=Spec(lambda model: made), training=SimpleNamespace(enable_cpu_offload=False))
    with other_stages(config) as follow:
        assert config.model_spec.pipelining_fn(None) is made
        follow(SimpleNamespace())


def test_a_model_without_pipelines_keeps_none() -> None:
    config = SimpleNamespace(model_spec=Spec(None))
    with other_stages(config):
        assert config.model_spec.pipelining_fn is None
