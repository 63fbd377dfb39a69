"""Every option of a command that README.md and docs/ name is an option of that command.

pytest tests/docs/test_command_options.py
"""

import re
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from bench.result_file import ROOT
from docs.blocks import pages
from memfit.cli import Verbs

PAGES = [*pages(), ROOT / "CONTRIBUTING.md"]
LINE = re.compile(r"^(?:    |\$ )(memfit .*)$|`(memfit [^`]*)`", re.MULTILINE)
OPTION = re.compile(r"(?<![\w-])--[a-z][\w-]*")


def commands(text: str) -> Iterator[str]:
    """Each command, without what follows a script's ``--`` or two spaces, and with continued lines joined."""
    for indented, quoted in LINE.findall(re.sub(r"\\\n *", "", text)):
        command = re.split(r"\s#|(?<=\S)\s{3,}", indented or " ".join(quoted.split()))[0]
        yield re.split(r"\s--\s", f"{command} ")[0]


def unknown(command: str) -> list[str]:
    """Options of a command that its verb has not."""
    words = command.split()
    if len(words) < 2 or not re.fullmatch("[a-z]+", words[1]):
        return []
    verb = Verbs().get_command(click.Context(Verbs()), words[1])
    assert verb is not None, command
    known = {"--help", *(name for parameter in verb.params for name in (*parameter.opts, *parameter.secondary_opts))}
    return [f"{words[1]} {option}" for option in OPTION.findall(command) if option not in known]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_option_of_a_command_is_there(page: Path) -> None:
    assert [name for command in commands(page.read_text()) for name in unknown(command)] == []


def test_an_option_that_is_not_there_is_seen() -> None:
    text = "    memfit plan JOB --global-batch 64 \\\n        --no-such  --out p.toml\n"
    assert [name for command in commands(text) for name in unknown(command)] == ["plan --no-such"]
    assert [list(commands(t)) for t in ("`memfit trace --steps 2 -- python train.py --lr 1`",)] == [
        ["memfit trace --steps 2"]
    ]
