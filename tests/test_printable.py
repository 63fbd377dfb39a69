"""What others wrote reaches the terminal as text: no escape sequence, no line of its own.

python -m pytest tests/test_printable.py
"""

import io

import pytest
from rich.live import Live

from memfit.engine.collectives import is_memory_failure
from memfit.engine.process_group import is_lost_rank
from memfit.errors import InputError, describe
from memfit.printable import one_line, printable
from memfit.show.console import make_console

HOSTILE = "\x1b]0;owned\x07\x1b[2Jx\x9b31m\u202egnp.exe\r\x08"


def test_control_characters_are_written_out():
    assert printable("a\tb\nc é 漢") == "a\tb\nc é 漢"
    assert printable(HOSTILE) == "\\x1b]0;owned\\x07\\x1b[2Jx\\x9b31m\\u202egnp.exe\\r\\x08"
    assert one_line("a\nb\x85c\u2028d") == "a b c d"
    assert printable("\ud800").encode()


def test_messages_of_errors():
    assert "\x1b" not in str(InputError(HOSTILE, "is wrong", "write another"))
    assert "\x1b" not in describe(ValueError(HOSTILE))


def test_an_exception_that_cannot_say_what_it_is():
    class SilentError(RuntimeError):
        def __str__(self):
            raise ValueError("planted")

    assert describe(SilentError()) == "SilentError"
    assert not is_memory_failure(SilentError())
    assert not is_lost_rank(SilentError())


@pytest.mark.parametrize("markup", [True, False])
def test_consoles_write_them_out_and_keep_their_own_styles(markup):
    file = io.StringIO()
    console = make_console(file=file, force_terminal=True, width=200)
    console.print(f"[bold]name[/] {HOSTILE}", markup=markup, soft_wrap=True)
    text = file.getvalue()
    assert "\\x1b]0;owned" in text
    assert "\x1b]" not in text
    assert ("\x1b[1mname" in text) is markup


def test_lines_beside_a_live_view():
    file = io.StringIO()
    console = make_console(file=file, force_terminal=True, width=200)
    with Live("still", console=console, auto_refresh=False):
        console.print(HOSTILE, markup=False, soft_wrap=True)
    assert "\x1b]" not in file.getvalue()
    assert "\\x1b]0;owned" in file.getvalue()


def test_a_name_that_is_no_markup_is_printed_as_it_is():
    file = io.StringIO()
    make_console(file=file, width=200).print("Written to a[/b].toml")
    assert file.getvalue() == "Written to a[/b].toml\n"
