"""memfit predict for several devices, and its --budget for continuous integration.

python -m pytest tests/cli/test_predict_devices.py
"""

import json

import pytest

from memfit.cli import main

TINY = ("predict", "testing/large_nets.py:Dit", "--set", "depth=1")


def run(capsys, *arguments):
    with pytest.raises(SystemExit) as ended:
        main([*TINY, *arguments])
    return ended.value.code, capsys.readouterr()


def test_several_devices_are_each_what_one_is(capsys):
    code, printed = run(capsys, "--device", "t4", "--device", "l40s", "--device", "rtx4090", "--json")
    assert code == 0
    answers = json.loads(printed.out)["devices"]
    for name, answer in answers.items():
        _, alone = run(capsys, "--device", name, "--json")
        assert {**json.loads(alone.out), "seconds": 0} == {**answer, "seconds": 0}


def test_files_of_several_devices_are_refused(capsys):
    code, printed = run(capsys, "--device", "t4", "--device", "l40s", "--snapshot", "s.pickle")
    assert code == 2
    assert "--snapshot with 2 devices" in printed.err


@pytest.mark.parametrize(("budget", "code", "kind"), [("1MiB", 3, "error"), ("10GiB", 0, "notice")])
def test_a_budget_decides_the_exit_code(capsys, budget, code, kind):
    ended, printed = run(capsys, "--device", "t4", "--budget", budget, "--ci")
    assert ended == code
    assert printed.out.startswith(f"::{kind}::testing/large_nets.py:Dit")
    assert printed.out.count("\n") == 1
    ended, printed = run(capsys, "--device", "t4", "--budget", budget, "--json")
    assert (ended, json.loads(printed.out)["within_budget"]) == (code, code == 0)


def test_ci_needs_a_budget(capsys):
    code, printed = run(capsys, "--device", "t4", "--ci")
    assert code == 2
    assert "--budget" in printed.err
