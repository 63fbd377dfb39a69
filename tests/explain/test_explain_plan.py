"""memfit explain of a plan with stages of a pipeline, and what memfit predict shows of them.

pytest tests/explain/test_explain_plan.py
"""

import io
import json
from dataclasses import replace

import pytest
import torch
from rich.console import Console

from memfit.cli import main
from memfit.device.hardware.catalogue import find_device
from memfit.installation import release_number
from memfit.job import Shape
from memfit.mesh import MeshShape
from memfit.plan import write_plan
from memfit.planner.plan_json import plan_json
from memfit.planner.predict import predict
from memfit.planner.request import PlanRequest
from memfit.planner.search.search import find_plan
from memfit.show.footprint_table import show_prediction
from memfit.sizes import format_size
from memfit.torch_compat.pipelining import OLDEST
from tests.engine.pipeline_jobs import Counted

pytestmark = pytest.mark.skipif(
    release_number(torch.__version__) < OLDEST, reason="memfit refuses pp before torch 2.13"
)
CARD = find_device("h100")
TWO = MeshShape(pp=2)


@pytest.fixture(scope="module")
def answer():
    return find_plan(Counted(), PlanRequest(name="counted", global_batch=16, device=CARD, devices=1, mesh=TWO))


def explained(capsys, *arguments):
    with pytest.raises(SystemExit) as caught:
        main(["explain", *arguments])
    out, err = capsys.readouterr()
    return int(caught.value.code or 0), out, err


def test_the_stages_of_a_plan_as_its_json_has_them(capsys, tmp_path, answer):
    write_plan(answer.plan, tmp_path / "plan.toml")
    code, out, _ = explained(capsys, str(tmp_path / "plan.toml"), "--json")
    explanation = json.loads(out)
    assert code == 0
    assert explanation["kind"] == "plan"
    assert explanation["stages"] == plan_json(answer)["stages"]
    assert [stage["modules"] for stage in explanation["stages"]] == [4, 3]
    assert explanation["stages"][0]["first_module"] == "net.embed"
    assert explanation["stages"][-1]["last_module"] == "net.head"


def test_the_stages_of_a_plan_in_text(capsys, tmp_path, answer):
    write_plan(answer.plan, tmp_path / "plan.toml")
    code, out, _ = explained(capsys, str(tmp_path / "plan.toml"))
    assert code == 0
    assert out.startswith("A plan: its peak is in training, ")
    shows_stages(out, plan_json(answer)["stages"])


def shows_stages(text, stages):
    for number, stage in enumerate(stages):
        (row,) = [line for line in text.splitlines() if line.split()[:2] == [str(number), stage["first_module"]]]
        assert f"{stage['first_module']} to {stage['last_module']}" in row
        assert f"{stage['forward_seconds']:.2g} s" in row
        assert f"{stage['backward_seconds']:.2g} s" in row
        assert format_size(stage["process_bytes"]) in row


def test_a_plan_of_another_kind_has_no_stages(capsys, tmp_path, answer):
    write_plan(replace(answer.plan, stages=[], phases={}), tmp_path / "plan")
    assert explained(capsys, str(tmp_path / "plan"))[1].startswith("A plan without a prediction")
    assert json.loads(explained(capsys, str(tmp_path / "plan"), "--json")[1])["stages"] == []


def test_a_plan_is_compared_with_no_job(capsys, tmp_path, answer):
    write_plan(answer.plan, tmp_path / "plan.toml")
    code, out, err = explained(capsys, str(tmp_path / "plan.toml"), "--job", "latentsync/tiny")
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert "a plan names its job and its device itself" in err


def test_a_prediction_of_a_pipeline_shows_its_stages():
    prediction = predict(Counted(), "counted", Shape(items=2), CARD, engine="fsdp2", world=2, mesh=TWO)
    console = Console(file=(file := io.StringIO()), width=200)
    show_prediction(prediction, console)
    shows_stages(file.getvalue(), [vars(stage) for stage in prediction.stages])
