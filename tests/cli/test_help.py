"""No help imports torch: that is what keeps it under half a second, which bench/help.py measures.

pytest tests/cli/test_help.py
"""

import json
import subprocess
import sys

import pytest

from memfit.cli import VERBS
from tests.cli.asking import ROOT

HELPS = {"--help": "Verbs", "-h": "Verbs", "--version": "torch"} | {f"{verb} --help": "Usage: memfit" for verb in VERBS}
HEAVY = ("torch", "numpy", "scipy", "rich", "diffusers", "transformers")
ASK = f"""
import json, sys
from memfit.cli import main
try:
    main(sys.argv[1:])
except SystemExit as stop:
    heavy = [name for name in {HEAVY} if name in sys.modules]
    print(json.dumps([stop.code, heavy]), file=sys.stderr)
"""


@pytest.mark.parametrize(("arguments", "words"), HELPS.items(), ids=HELPS)
def test_help_imports_nothing_heavy(arguments: str, words: str) -> None:
    run = [sys.executable, "-c", ASK, *arguments.split()]
    done = subprocess.run(run, capture_output=True, text=True, cwd=ROOT, check=False)
    assert json.loads(done.stderr) == [0, []]
    assert words in done.stdout


def test_every_option_says_what_it_is() -> None:
    import click

    from memfit.cli import root

    context = click.Context(root)
    commands = {verb: root.get_command(context, verb) for verb in VERBS}
    options = {
        f"{verb} {option.name}": option.help
        for verb, command in commands.items()
        if command is not None
        for option in command.params
        if isinstance(option, click.Option)
    }
    assert [name for name, text in options.items() if not text] == []


def test_importing_memfit_imports_nothing_heavy() -> None:
    ask = f"import memfit, sys; print([name for name in {HEAVY} if name in sys.modules], memfit.Shape(items=2).units)"
    done = subprocess.run([sys.executable, "-c", ask], capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.stdout == "[] 2\n"


def test_every_public_name_is_there() -> None:
    import memfit

    assert all(getattr(memfit, name) is not None for name in memfit.__all__)
    assert set(memfit.__all__) <= set(dir(memfit))
    assert sorted(memfit.__all__) == sorted(memfit._MODULE_OF)
    with pytest.raises(AttributeError, match="no attribute 'Jobs'"):
        _ = memfit.Jobs
