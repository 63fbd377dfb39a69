"""The terminal that tables and messages are printed on."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

from rich.console import Console, ConsoleOptions, ConsoleRenderable, RenderHook
from rich.errors import MarkupError
from rich.segment import Segment
from rich.text import Text

from memfit.printable import printable

UNBROKEN = 10_000
"""Characters of a line that no person reads on a terminal: wider than any."""


def make_console(**options: Any) -> Console:
    """A rich console that shows control characters of what it prints written out.

    Names of modules, settings and files come from a job, a plan or a run of somebody else; rich passes escape
    sequences in them on to the terminal. What goes to a file or another command has one line for each sentence and
    row, unless COLUMNS says how many characters a line has.

    Args:
        options: those of ``rich.console.Console``; ``highlight`` is off.
    """
    console = PrintableConsole(**{"highlight": False, **options})
    if not console.is_terminal and "width" not in options and not os.environ.get("COLUMNS", "").isdigit():
        console.width = UNBROKEN
    console.push_render_hook(_Printable())
    return console


class PrintableConsole(Console):
    """A rich console that prints text which is no valid markup as it is: names may hold brackets."""

    def render_str(self, text: str, **options: Any) -> Text:
        """The text, with its markup where that is valid."""
        try:
            return super().render_str(text, **options)
        except MarkupError:
            return Text(text, style=options.get("style", ""))


class _Printable(RenderHook):
    def process_renderables(self, renderables: list[ConsoleRenderable]) -> list[ConsoleRenderable]:
        return [_Wrapped(renderable) for renderable in renderables]


class _Wrapped:
    def __init__(self, renderable: ConsoleRenderable) -> None:
        self._renderable = renderable

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Segment]:
        for segment in console.render(self._renderable, options):
            yield segment if segment.control else Segment(printable(segment.text), segment.style)
