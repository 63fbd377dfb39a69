"""``--device A B`` is ``--device A --device B``, where a verb takes several devices.

python -m pytest tests/cli/test_device_arguments.py
"""

import json

import pytest

from memfit.cli import main, root
from memfit.cli.device_arguments import with_each_device


@pytest.mark.parametrize(
    ("verb", "written", "meant"),
    [
        ("max", ["j", "--device", "t4", "l4"], ["j", "--device", "t4", "--device", "l4"]),
        ("max", ["--device", "t4", "l4", "j"], ["--device", "t4", "--device", "l4", "j"]),
        ("predict", ["--device=t4", "RTX-4090", "j", "l4"], ["--device=t4", "--device", "RTX-4090", "j", "l4"]),
        ("predict", ["--device", "t4", "all", "--json"], ["--device", "t4", "--device", "all", "--json"]),
        ("predict", ["--device", "t4", "--set", "l4"], ["--device", "t4", "--set", "l4"]),
        ("trace", ["--device", "t4", "cpu", "--", "python", "l4"],
         ["--device", "t4", "--device", "cpu", "--", "python", "l4"]),
        ("trace", ["--", "python", "--device", "t4", "l4"], ["--", "python", "--device", "t4", "l4"]),
        ("compare", ["j", "--device", "t4", "l4"], ["j", "--device", "t4", "l4"]),
    ],
)  # fmt: skip
def test_a_device_after_a_device_is_one_more(verb, written, meant):
    assert with_each_device(root.get_command(None, verb), written) == meant


def test_every_device_is_answered(capsys):
    with pytest.raises(SystemExit) as end:
        main(["predict", "examples/gan.py:Waves", "--device", "t4", "l4", "a100-40gb:1g.5gb", "--json"])
    assert end.value.code == 0
    assert list(json.loads(capsys.readouterr().out)["devices"]) == ["t4", "l4", "a100-40gb:1g.5gb"]


def test_a_verb_that_takes_one_device_says_so(capsys):
    with pytest.raises(SystemExit) as end:
        main(["compare", "examples/gan.py:Waves", "--device", "t4", "l4", "--set", "samples=64"])
    assert end.value.code == 2
    assert "l4" in capsys.readouterr().err
