"""--engine-choice: an engine's own choices, in predict, plan and verify.

python -m pytest tests/cli/test_engine_choices.py
"""

import json

import pytest

from memfit.plan import read_plan
from tests.cli.asking import is_one_line

JOB = "examples/language_model.py:LanguageModel"
SMALL = ("--set", "layers=2", "--set", "width=128")
DIVIDED = ("--engine-choice", "sequence_parallel=true")


def predicted(run, *words):
    return json.loads(run("predict", JOB, *SMALL, "--micro-batch", "8192", "--device", "rtx4090", "--json", *words)[1])


def test_divided_tokens_take_less_memory_on_each_rank(run):
    whole, divided = (predicted(run, "--mesh", "tp=2", *words) for words in ((), DIVIDED))
    kept = [answer["phases"]["train"]["categories"]["activations"] for answer in (whole, divided)]
    assert kept[1] < 0.9 * kept[0]
    assert divided["phases"]["save"]["categories"] == whole["phases"]["save"]["categories"]


def test_a_plan_has_the_choice_and_splits_the_batch_where_ranks_divide_sequences(run, tmp_path):
    file = tmp_path / "plan.toml"
    words = ("--global-batch", "20000", "--mesh", "tp=2", *DIVIDED, "--device", "rtx4090", "--out", str(file))
    code, _, error = run("plan", JOB, *SMALL, *words)
    assert code == 0, error
    assert read_plan(file).engine_choices == {"sequence_parallel": True}


@pytest.mark.parametrize("schedule", ["gpipe", "interleaved_1f1b"])
def test_a_plan_of_stages_has_the_schedule_and_the_cut_for_it(run, tmp_path, schedule):
    file = tmp_path / "plan.toml"
    words = ("--global-batch", "32768", "--mesh", "pp=2", "--engine-choice", f"schedule={schedule}")
    code, _, error = run("plan", JOB, *SMALL, *words, "--device", "rtx4090", "--out", str(file))
    assert code == 0, error
    plan = read_plan(file)
    assert plan.engine_choices["schedule"] == schedule
    assert len(plan.engine_choices["first_modules"]) == len(plan.stages) == (2 if schedule == "gpipe" else 4)
    assert plan.reasons["engine_choices"] == "--engine-choice sets schedule"


@pytest.mark.slow
def test_ranks_with_a_choice_learn_what_one_rank_learns(run):
    code, said, error = run("verify", JOB, *SMALL, "--mesh", "tp=2", *DIVIDED, "--windows", "1", "--json")
    assert code == 0, error
    assert json.loads(said)["ok"]


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (DIVIDED, "no engine is named that it could be of; write --engine or --mesh too"),
        (("--mesh", "tp=2", "--engine-choice", "sequence=true"), "no such choice; write sequence_parallel"),
        (("--mesh", "tp=2", "--engine-choice", "sequence_parallel"), "write --engine-choice name=value"),
        (("--mesh", "tp=2", "--engine-choice", "sequence_parallel=yes"), "neither true nor false; write one of them"),
        (("--mesh", "dp_shard=2", *DIVIDED), "it is of layers that are cut (tp); take the key out"),
        (("--mesh", "tp=2", *DIVIDED, "--shape", "3x333"), "a sequence of 333 tokens on tp=2: it does not divide"),
    ],
)
def test_a_choice_that_cannot_be_is_one_line(run, words, line):
    is_one_line(run("predict", JOB, *SMALL, "--device", "rtx4090", *words), line)


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (("--devices", "8", "--nodes", "2", "--engine", "fsdp2", *DIVIDED), "--nodes searches meshes"),
        (
            ("--mesh", "pp=2", "--engine-choice", "first_modules=['llama.model.embed_tokens', 'llama.lm_head']"),
            "a plan chooses where the nets are cut; leave it out, or write it in [engine_choices] of the plan",
        ),
        (("--mesh", "tp=2", "--engine-choice", "schedule=gpipe"), "engine_choices.schedule on the mesh tp=2"),
    ],
)
def test_a_choice_that_a_search_would_overrule_is_refused(run, words, line):
    is_one_line(run("plan", JOB, *SMALL, "--global-batch", "20000", "--device", "rtx4090", *words), line)
