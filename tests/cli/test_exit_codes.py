"""The exit code of a question that is answered with no: 3, and what does fit stays 0.

python -m pytest tests/cli/test_exit_codes.py
"""

import json

import pytest

from memfit.cli import main

JOB = ["testing/large_nets.py:Dit", "--set", "depth=1"]


def ask(capsys, *arguments):
    with pytest.raises(SystemExit) as ended:
        main([*arguments, "--json"])
    return ended.value.code, json.loads(capsys.readouterr().out)


@pytest.mark.parametrize(("memory", "code", "fits"), [("24GiB", 0, True), ("300MiB", 3, False)])
def test_predict_ends_with_3_where_the_step_does_not_fit(capsys, memory, code, fits):
    ended, answer = ask(capsys, "predict", *JOB, "--device", "rtx4090", "--memory", memory, "--micro-batch", "4")
    assert ended == code
    assert answer["fits"] is fits


@pytest.mark.parametrize(("memory", "code"), [("24GiB", 0), ("300MiB", 3)])
def test_plan_ends_with_3_where_nothing_fits(capsys, tmp_path, memory, code):
    file = tmp_path / "p.toml"
    arguments = ["--device", "rtx4090", "--memory", memory, "--global-batch", "4", "--out", str(file)]
    ended, _ = ask(capsys, "plan", *JOB, *arguments)
    assert ended == code
    assert file.exists() is (code == 0)
