"""One HTML file that needs no network: what a report is made of, and how it is written."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib import import_module
from importlib.resources import files
from pathlib import Path
from typing import Any

from memfit.atomic_file import write_atomic
from memfit.errors import InputError, unwritable


@dataclass(frozen=True, kw_only=True)
class Table:
    """Text in rows; the first cell of a row names it. A column called ``share`` holds parts of 1, drawn as bars."""

    caption: str
    columns: tuple[str, ...]
    rows: Sequence[Sequence[Any]]
    numeric: tuple[str, ...] = ()
    code: tuple[str, ...] = ()
    """Columns of module paths and operators."""
    text: tuple[str, ...] = ()
    """Columns of sentences."""


@dataclass(frozen=True, kw_only=True)
class Section:
    """One heading of a page and what stands under it, in this order."""

    title: str
    text: str = ""
    arithmetic: str = ""
    reasons: dict[str, str] = field(default_factory=dict)
    figure: dict[str, Any] | None = None
    """What report.js draws: its ``kind`` is timeline or windows, its ``id`` is the element's."""
    findings: Sequence[dict[str, str]] = ()
    tables: Sequence[Table] = ()
    folded: Sequence[Table] = ()
    """Tables that are opened by hand."""
    strips: Sequence[dict[str, Any]] = ()
    commands: Sequence[str] = ()
    """Lines for a shell."""


@dataclass(frozen=True, kw_only=True)
class Page:
    """A report. ``tone`` is good, close, bad or plain; ``notes`` say what is not in it, and why; ``advice`` is what to
    do next."""

    title: str
    verdict: str
    tone: str
    about: Sequence[str]
    sections: Sequence[Section]
    notes: Sequence[str] = ()
    advice: str = ""


def render(page: Page) -> str:
    """The page as HTML. Whatever text it holds is escaped; only the page's own scripts may run, and nothing is fetched.

    Raises:
        InputError: the extra ``report`` is not installed.
    """
    from markupsafe import Markup

    figures = [section.figure for section in page.sections if section.figure is not None]
    scripts = [_plotly(), own_file("report.js")] if figures else []
    return str(
        environment()
        .from_string(own_file("report.html"))
        .render(
            page=page,
            css=Markup(own_file("report.css")),
            figures=Markup(_json(figures)),
            plotly=Markup(scripts[0] if scripts else ""),
            js=Markup(scripts[1] if scripts else ""),
            script_hashes=" ".join(map(script_hash, scripts)) or "'none'",
        )
    )


def write_page(page: Page, path: str | Path) -> None:
    """Writes the page.

    Raises:
        InputError: the file cannot be written.
    """
    try:
        write_atomic(path, render(page))
    except OSError as error:
        raise unwritable(f"report {path}", error) from error


def environment() -> Any:
    """Jinja's environment of a page, which escapes all text.

    Raises:
        InputError: jinja2 is not installed.
    """
    try:
        jinja2 = import_module("jinja2")
    except ImportError:
        raise InputError("an HTML page", "jinja2 is not installed", "run pip install jinja2") from None
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True)
    environment.filters["path"] = _path
    return environment


def _path(text: str) -> Any:
    """A module path that a narrow column breaks after its dots and underscores."""
    from markupsafe import Markup, escape

    return escape(text).replace(".", Markup(".<wbr>")).replace("_", Markup("_<wbr>"))


def _plotly() -> str:
    try:
        offline = import_module("plotly.offline")
    except ImportError:
        raise InputError("memfit report", "plotly is not installed", "run pip install plotly") from None
    return str(offline.get_plotlyjs())


def own_file(name: str) -> str:
    """The text of a file of this folder."""
    return files("memfit.show").joinpath(name).read_text(encoding="utf-8")


def _json(value: Any) -> str:
    """JSON that can stand inside of a script element: no ``<`` in it, and no number that is not finite."""
    return json.dumps(value, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c").replace("&", "\\u0026")


def script_hash(script: str) -> str:
    """A source of the page's content security policy: browsers hash the text after they have made CRLF into LF."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}'"
