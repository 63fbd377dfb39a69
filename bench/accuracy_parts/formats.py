"""Every table format that ``--data`` takes besides the first one, told apart by their columns."""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from bench.accuracy_parts import recipes, timm_fits, xmem
from bench.accuracy_parts.sampling import fair_sample
from bench.accuracy_parts.table import COLUMNS as GPUMEMNET_COLUMNS
from bench.accuracy_parts.timm_fits import Untraced
from memfit.errors import InputError

Row = TypeVar("Row")
XMEM_COLUMNS = ("card", "model", "optimizer", "batch", "seq_or_image", "zero_grad", "measured_peak_bytes", "oom")
FORMATS = {
    "gpumemnet": GPUMEMNET_COLUMNS,
    "timm_amp": timm_fits.COLUMNS,
    "xmem": XMEM_COLUMNS,
    "recipes": recipes.COLUMNS,
}
"""Format -> the columns that a table of it has at least."""


@dataclass(frozen=True, kw_only=True)
class Judged:
    """A table's result: statistics under the format's name, by card, precision and family, and row by row."""

    format: str
    statistics: dict[str, Any]
    groups: dict[str, dict[str, dict[str, Any]]] = field(default_factory=dict)
    """Column -> value of it -> statistics."""
    rows: list[list[Any]] = field(default_factory=list)
    untraced: dict[str, str] = field(default_factory=dict)
    without_recipe: dict[str, int] = field(default_factory=dict)
    """Reason -> rows that have none."""

    def as_json(self) -> dict[str, Any]:
        """The result file's part."""
        answer: dict[str, Any] = {self.format: self.statistics, "groups": self.groups, "not_traced": self.untraced}
        if self.without_recipe:
            answer["rows_without_a_recipe"] = sum(self.without_recipe.values())
            answer["why_without"] = self.without_recipe
        return answer | {"rows": self.rows}


def format_of(path: Path) -> str:
    """The format of a table.

    Raises:
        InputError: no such file, or the columns of no format.
    """
    if not path.exists():
        raise InputError(f"--data {path}", "there is no such file", "write the path of a CSV file")
    with path.open(newline="") as file:
        columns = set(next(csv.reader(file), []))
    missing = {name: [column for column in wanted if column not in columns] for name, wanted in FORMATS.items()}
    nearest = min(missing, key=lambda name: len(missing[name]) / len(FORMATS[name]))
    if missing[nearest]:
        wanted = ", ".join(FORMATS[nearest])
        raise InputError(f"--data {path}", f"no column {missing[nearest][0]}", f"write the columns {wanted}")
    return nearest


def judge(path: Path, count: int | None, seed: int, workers: int, note: Callable[[str], None]) -> Iterator[Judged]:
    """Predicts a table of any format but GPUMemNet's; ``count`` nets of it at most.

    Gives a result after each net or run, of those so far, whose order makes them a fair sample; the last is the whole.
    """
    name = format_of(path)
    if name == "timm_amp":
        runs = timm_fits.sample(timm_fits.read(path), count, seed)
        judged_rows: Iterable[Any] = timm_fits.answers(runs, workers)
        result: Callable[[list[Any], dict[str, str]], Judged] = _timm
    elif name == "xmem":
        judged_rows = xmem.answers(_some(xmem.read(path), lambda run: run.model, count, seed), workers)
        result = _xmem
    else:
        figures, without = recipes.read(path)
        judged_rows = recipes.answers(_some(figures, lambda figure: figure.model, count, seed), workers)
        result = partial(_recipes, without=without)
    rows: list[Any] = []
    untraced: dict[str, str] = {}
    for answer in judged_rows:
        if isinstance(answer, Untraced):
            untraced[answer.name] = answer.why
            note(f"not traced: {answer.name}: {answer.why}")
        else:
            rows += answer if isinstance(answer, list) else [answer]
        yield result(rows, untraced)
    if not rows and not untraced:
        yield result(rows, untraced)


def _some(rows: Sequence[Row], key: Callable[[Row], str], count: int | None, seed: int) -> list[Row]:
    chosen = set(fair_sample(map(key, rows), count, seed))
    return [row for row in rows if key(row) in chosen]


def _by(
    rows: Sequence[Row], keys: dict[str, Callable[[Row], str]], statistics: Callable[[Sequence[Row]], dict[str, Any]]
) -> dict[str, dict[str, dict[str, Any]]]:
    groups: dict[str, dict[str, dict[str, Any]]] = {}
    for column, key in keys.items():
        values = sorted({key(row) for row in rows})
        groups[column] = {value: statistics([row for row in rows if key(row) == value]) for value in values}
    return groups


def _timm(rows: list[Any], untraced: dict[str, str]) -> Judged:
    keys: dict[str, Callable[[Any], str]] = {
        "torch": lambda row: row.run.torch,
        "layout": lambda row: row.run.layout,
        "family": lambda row: row.net_kind,
    }
    lines = [
        [row.run.model, row.run.layout, row.run.torch, row.run.image, row.run.ran, *row.ran, row.run.failed,
         *(row.failed or (None, None, None))] for row in rows
    ]  # fmt: skip
    return Judged(
        format="timm_amp", statistics=timm_fits.statistics(rows), groups=_by(rows, keys, timm_fits.statistics),
        rows=lines, untraced=untraced,
    )  # fmt: skip


def _xmem(rows: list[Any], untraced: dict[str, str]) -> Judged:
    keys: dict[str, Callable[[Any], str]] = {
        "card": lambda row: row.run.card,
        "family": lambda row: row.net_kind,
        "optimizer": lambda row: row.run.optimizer,
    }
    lines = [
        [row.run.model, row.run.card, row.run.optimizer, row.run.batch, row.run.oom, row.run.measured, row.predicted,
         row.low, row.high, row.fits, row.estimates] for row in rows
    ]  # fmt: skip
    return Judged(
        format="xmem", statistics=xmem.statistics(rows), groups=_by(rows, keys, xmem.statistics), rows=lines,
        untraced=untraced,
    )  # fmt: skip


def _recipes(rows: list[Any], untraced: dict[str, str], without: dict[str, int]) -> Judged:
    keys: dict[str, Callable[[Any], str]] = {
        "source": lambda row: row.figure.recipe.name,
        "card": lambda row: row.figure.recipe.card,
        "precision": lambda row: row.figure.loop.precision,
        "family": lambda row: row.net_kind,
        "metric": lambda row: row.figure.recipe.metric,
        "grade": lambda row: row.figure.grade,
    }
    lines = [
        [row.figure.recipe.name, row.figure.model, row.figure.loop.batch, row.figure.recipe.metric,
         row.figure.measured, row.predicted, row.low, row.high, row.estimates] for row in rows
    ]  # fmt: skip
    return Judged(
        format="recipes", statistics=recipes.statistics(rows), groups=_by(rows, keys, recipes.statistics), rows=lines,
        untraced=untraced, without_recipe=without,
    )  # fmt: skip
