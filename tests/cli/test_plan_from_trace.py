"""``memfit plan --from-trace`` on the command line."""

import json
from pathlib import Path

import pytest

from tests.cli.asking import Run
from tests.script.test_saved_answer import ANSWER, OPTIONS, written


def test_the_verb_prints_the_edits_and_says_by_its_code_whether_it_fits(run: Run, tmp_path: Path) -> None:
    path = written(tmp_path, ANSWER)
    code, out, _ = run("plan", "--from-trace", path)
    assert code == 0
    assert out.startswith("train.py fits on")
    assert "free logits" in out
    code, out, _ = run("plan", "--from-trace", path, "--memory", "8GiB")
    assert code == 3
    assert "does not fit" in out


def test_edits_are_written_in_the_words_of_a_trainer_that_has_an_argument_for_them(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    with_words = {**OPTIONS[1], "for_tools": {"lightning": 'Trainer(precision="bf16-mixed")'}}
    path = written(tmp_path, ANSWER | {"options": [OPTIONS[0], with_words]})
    code, out, _ = run("plan", "--from-trace", path, "--for", "lightning")
    assert code == 0
    assert 'Trainer(precision="bf16-mixed")' in out
    assert "del logits" in out
    _, out, _ = run("plan", "--from-trace", path, "--for", "lightning", "--json")
    (answer,) = json.loads(out)["devices"].values()
    assert [option["for"] for option in answer["options"]] == [None, 'Trainer(precision="bf16-mixed")']
    _, out, _ = run("plan", "--from-trace", path, "--for", "transformers")
    assert "bf16-mixed" not in out
    code, _, said = run("plan", "--from-trace", path, "--for", "slurm")
    assert code == 2
    assert said.count("\n") == 1
    assert "write one of deepspeed, accelerate, lightning, transformers, torchtitan" in said


def test_a_job_and_a_trace_are_not_both_given(run: Run, tmp_path: Path) -> None:
    code, _, said = run("plan", "net:Net", "--from-trace", written(tmp_path, ANSWER))
    assert code == 2
    assert "write one of them" in said
    for words, missing in ((("plan",), "JOB"), (("plan", "net:Net"), "--global-batch")):
        code, _, said = run(*words)
        assert code == 2
        assert f"{missing} is missing" in said
