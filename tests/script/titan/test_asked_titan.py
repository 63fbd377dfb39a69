"""What is refused of a configuration, without torchtitan: pytest tests/script/titan/test_asked_titan.py"""

from types import SimpleNamespace

import pytest

from memfit.device.hardware.catalogue import find_device
from memfit.errors import InputError
from memfit.job import Shape
from memfit.mesh import MeshShape
from memfit.planner.prediction import NetSize
from memfit.script.outcome import TraceRequest
from memfit.script.titan import asked_titan
from memfit.script.titan.asked_titan import AskedTitan
from memfit.script.titan.describe import Description
from memfit.script.titan.target import DEGREES, parse_target
from tests.script.test_batch_scan import trace_of


def asked(torch: str, *, has_pipelines: bool, backend: str = "full_dtensor", **mesh: int) -> AskedTitan:
    """The debug model on a mesh, as it is described beside a version of torch."""
    degrees = dict.fromkeys(DEGREES, 1) | mesh
    question = AskedTitan("torchtitan:small", parse_target("torchtitan:small", None, {}), mesh=MeshShape(**mesh))
    question.__dict__["description"] = Description(
        module="llama3", config="small", degrees=degrees, batch=8, length=256, backend=backend, not_modelled={},
        not_validated=(), loader="Rows", makes_rows=True, has_pipelines=has_pipelines,
        net=NetSize(name="llama3", parameters=8, trainable=8, tensors=1, trainable_tensors=1),
        torch=torch, torchtitan="0.3.0",
    )  # fmt: skip
    return question


def test_pipelines_are_refused_beside_schedules_that_take_no_micro_batches() -> None:
    question = asked("2.13.0", has_pipelines=False, pp=2)
    with pytest.raises(InputError, match="do not take micro-batches as torchtitan gives them") as error:
        question.question(Shape(items=8), find_device("h100"))
    assert error.value.write == "install torch 2.14, or leave pp out"


def test_a_pipeline_s_answer_is_of_the_first_rank_of_each_place(monkeypatch: pytest.MonkeyPatch) -> None:
    requested: list[TraceRequest] = []

    def trace(request: TraceRequest) -> SimpleNamespace:
        requested.append(request)
        return SimpleNamespace(error=None, trace=trace_of([1]), windows=2, ended="", facts=(), not_seen=())

    monkeypatch.setattr(asked_titan, "trace_script", trace)
    question = asked("2.14.1", has_pipelines=True, pp=2, dp_shard=2, tp=2)
    answer = question.question(Shape(items=8), find_device("h100"))
    assert list(answer.traces) == [request.rank for request in requested] == [0, 4]
    assert [request.command.environment["RANK"] for request in requested] == ["0", "4"]
    assert "each place in the pipeline" in answer.rank_reason
    alone = question.question(Shape(items=8), find_device("h100"), rank=3)
    assert (list(alone.traces), alone.rank_reason) == ([3], "")
    whole = asked("2.14.1", has_pipelines=True, dp_shard=4).question(Shape(items=8), find_device("h100"))
    assert list(whole.traces) == [0]


def test_without_a_number_of_ranks_there_are_as_many_as_experts_are_divided_over() -> None:
    question = asked("2.14.1", has_pipelines=True)
    question.description.degrees.update(dp_shard=-1, tp=2, ep=8)
    question._asked_world = None
    assert question.mesh.sizes() == {"dp_shard": 4, "tp": 2, "ep": 8}
    assert question.world == 8


@pytest.mark.parametrize(
    ("shard", "write"), [(-1, "write --world 8, or"), (3, "parallelism.data_parallel_shard_degree=4, or a multiple")]
)
def test_ranks_that_experts_are_not_divided_over_say_how_many_to_write(shard: int, write: str) -> None:
    question = asked("2.14.1", has_pipelines=True)
    question.description.degrees.update(dp_shard=shard, tp=2, ep=8)
    question._asked_world = 6
    with pytest.raises(InputError, match="ep=8 does not divide the 6 ranks of dp_shard, cp and tp") as error:
        question.mesh  # noqa: B018
    assert write in error.value.write


def test_a_package_that_is_missing_is_to_be_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    error = SimpleNamespace(summary="No module named 'kernels'", hint="install kernels, or write --stub kernels if so")
    monkeypatch.setattr(asked_titan, "trace_script", lambda request: SimpleNamespace(error=error))
    with pytest.raises(InputError) as refused:
        asked("2.14.1", has_pipelines=True).question(Shape(items=8), find_device("h100"))
    assert refused.value.write == "install kernels"
