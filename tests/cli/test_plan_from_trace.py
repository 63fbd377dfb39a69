"""``memfit plan --from-trace`` on the command line."""

from pathlib import Path

from tests.cli.asking import Run
from tests.script.test_saved_answer import ANSWER, written


def test_the_verb_prints_the_edits_and_says_by_its_code_whether_it_fits(run: Run, tmp_path: Path) -> None:
    path = written(tmp_path, ANSWER)
    code, out, _ = run("plan", "--from-trace", path)
    assert code == 0
    assert out.startswith("train.py fits on")
    assert "free logits" in out
    code, out, _ = run("plan", "--from-trace", path, "--memory", "8GiB")
    assert code == 3
    assert "does not fit" in out


def test_a_job_and_a_trace_are_not_both_given(run: Run, tmp_path: Path) -> None:
    code, _, said = run("plan", "net:Net", "--from-trace", written(tmp_path, ANSWER))
    assert code == 2
    assert "write one of them" in said
    for words, missing in ((("plan",), "JOB"), (("plan", "net:Net"), "--global-batch")):
        code, _, said = run(*words)
        assert code == 2
        assert f"{missing} is missing" in said
