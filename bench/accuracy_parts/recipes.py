"""Published figures by recipe: rows of measured_public.csv whose script a file of bench/recipes describes.

A recipe names the rows that it is for (regular expressions of columns), and the loop that the row's script runs, as
fields of ``bench.accuracy_parts.loop.Loop``. ``${batch}`` and the like come from the row itself: ``batch``, and ``seq``
as the length of a text or the side of an image. Rows without a recipe are counted and left out.
"""

from __future__ import annotations

import csv
import re
import tomllib
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import numpy as np

from bench.accuracy_parts import environments, estimators
from bench.accuracy_parts.four_bit_base import MODES
from bench.accuracy_parts.loop import Loop, trace_loop
from bench.accuracy_parts.timm_fits import Untraced
from bench.accuracy_parts.workers import each
from memfit.device.hardware.catalogue import find_device, with_torch
from memfit.errors import InputError

WITHOUT = "without.toml"
"""The file of the folder that says of which rows there is no recipe, and why."""
FOLDER = Path(__file__).resolve().parents[1] / "recipes"
COLUMNS = ("source", "card", "model", "config", "batch", "seq", "precision", "optimizer", "metric", "unit", "value")
_UNITS = {"bytes": 1, "B": 1, "GB": 10**9, "GB (1e9)": 10**9, "GiB": 2**30, "MiB": 2**20, "MB": 10**6}
_METRICS = ("allocated", "reserved", "process")


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """One script's loop, and the rows that it is for."""

    name: str
    card: str
    """The catalogue's name of the card."""
    metric: str
    """What the figure counts: ``allocated``, ``reserved`` or ``process``."""
    rows: dict[str, str]
    """Column -> regular expression that its whole text matches."""
    loop: dict[str, Any]
    nets: dict[str, str] = field(default_factory=dict)
    """Net's name in its library -> regular expression that the whole text of ``net_column`` matches: a row of none of
    them is not the recipe's. Empty: ``loop``'s net, or the row's model."""
    net_column: str = "model"
    unknown: str = ""
    """What the source does not say and may move the figure."""


@dataclass(frozen=True, kw_only=True)
class Figure:
    """A row with its recipe; bytes."""

    recipe: Recipe
    model: str
    source: str
    grade: str
    measured: int
    loop: Loop
    torch_version: str | None = None
    """As the row's ``versions`` has it; None: not stated, and the installed one's rules are taken."""


@dataclass(frozen=True, kw_only=True)
class FigureAnswer:
    """A row with what is predicted for it, in bytes."""

    figure: Figure
    net_kind: str
    predicted: int
    low: int
    high: int
    estimates: dict[str, int] = field(default_factory=dict)
    """Simple estimators of others, for the same net."""

    @property
    def error(self) -> float:
        """(predicted - measured) / measured."""
        return self.predicted / self.figure.measured - 1


def read_recipes(folder: Path = FOLDER) -> list[Recipe]:
    """Every recipe of every file; a file's ``[common]`` table is under each of its ``[[recipe]]``."""
    recipes = []
    for path in sorted(path for path in folder.glob("*.toml") if path.name != WITHOUT):
        table = tomllib.loads(path.read_text())
        common = table.get("common", {})
        for own in table.get("recipe", []):
            merged = common | own
            loop = common.get("loop", {}) | own.get("loop", {})
            rows = common.get("rows", {}) | own.get("rows", {})
            nets = common.get("nets", {}) | own.get("nets", {})
            _check(path, loop, merged)
            recipes.append(
                Recipe(
                    name=path.stem,
                    card=merged["card"],
                    metric=merged["metric"],
                    rows=rows,
                    loop=loop,
                    nets=nets,
                    net_column=merged.get("net_column", "model"),
                    unknown=merged.get("unknown", ""),
                )
            )
    return recipes


def _check(path: Path, loop: dict[str, Any], merged: dict[str, Any]) -> None:
    known = {each.name for each in fields(Loop)}
    for name in loop:
        if name not in known:
            raise InputError(
                f"{path.name}: loop.{name}", "no field of a loop", f"write one of {', '.join(sorted(known))}"
            )
    if loop.get("quantize") and loop["quantize"] not in MODES:
        why = f"bitsandbytes has no such 4-bit mode: {loop['quantize']!r}"
        raise InputError(f"{path.name}: loop.quantize", why, f"write one of {', '.join(MODES)}")
    if merged.get("metric") not in _METRICS:
        raise InputError(f"{path.name}: metric", "not known", f"write one of {', '.join(_METRICS)}")


def read(path: Path, recipes: Sequence[Recipe] | None = None) -> tuple[list[Figure], dict[str, int]]:
    """(rows with a recipe, number of rows that have none by the reason)."""
    recipes = read_recipes() if recipes is None else recipes
    reasons = tomllib.loads((FOLDER / WITHOUT).read_text())["rows"]
    figures = []
    without: Counter[str] = Counter()
    with path.open(newline="") as file:
        for row in csv.DictReader(file):
            figure = next((_figure(row, recipe) for recipe in recipes if _is_for(recipe, row)), None)
            if figure is None:
                without[reason(row, reasons)] += 1
            else:
                figures.append(figure)
    return figures, dict(without)


def reason(row: dict[str, str], reasons: Sequence[dict[str, str]]) -> str:
    """Why a row has no recipe; "not known" where nobody has said so."""
    for entry in reasons:
        wanted = {column: text for column, text in entry.items() if column != "why"}
        if all(re.fullmatch(text, row.get(column, ""), re.DOTALL) for column, text in wanted.items()):
            return entry["why"]
    return "not known"


def _is_for(recipe: Recipe, row: dict[str, str]) -> bool:
    matches = all(re.fullmatch(text, row.get(column, ""), re.DOTALL) for column, text in recipe.rows.items())
    matches = matches and (not recipe.nets or _net(recipe, row) is not None)
    return matches and _number(row["value"]) is not None and row["unit"] in _UNITS


def _net(recipe: Recipe, row: dict[str, str]) -> str | None:
    text = row.get(recipe.net_column, "")
    return next((name for name, wanted in recipe.nets.items() if re.fullmatch(wanted, text, re.DOTALL)), None)


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


def _figure(row: dict[str, str], recipe: Recipe) -> Figure:
    loop = dict(recipe.loop)
    loop["net"] = loop.get("net") or _net(recipe, row) or row["model"]
    if "batch" not in loop:
        loop["batch"] = int(row["batch"])
    if loop.get("fsdp1"):
        loop["ranks"] = int(row["world"])
    side = "image" if loop.get("kind") in ("timm", "torchvision") else "length"
    if side not in loop and row["seq"].isdigit():
        loop[side] = int(row["seq"])
    grade = re.search(r"grade ([A-Z])", row.get("notes", ""))
    stated = re.search(r"\btorch (\d+\.\d\S*)", row.get("versions", ""))
    torch_version = stated[1].rstrip(",") if stated else None
    loop.setdefault("torch", torch_version or "")
    return Figure(
        torch_version=torch_version,
        recipe=recipe, model=row["model"], source=row["source"], grade=grade[1] if grade else "",
        measured=round((_number(row["value"]) or 0) * _UNITS[row["unit"]]), loop=Loop(**loop),
    )  # fmt: skip


def answers(figures: Sequence[Figure], workers: int) -> Iterator[list[FigureAnswer] | Untraced]:
    """Predictions as they come; rows with the same loop share one trace."""
    for environment in sorted({figure.loop.environment for figure in figures}):
        environments.install(environment)
        groups: dict[str, list[Figure]] = {}
        for figure in figures:
            if figure.loop.environment == environment:
                groups.setdefault(f"{figure.recipe.card} {figure.torch_version} {figure.loop}", []).append(figure)
        yield from each(_group, list(groups.values()), workers)


def _group(figures: list[Figure]) -> list[FigureAnswer] | Untraced:
    loop = figures[0].loop
    environments.enter(loop.environment)
    import torch

    from memfit.planner.prediction import footprint_on

    torch.set_num_threads(1)
    try:
        device, version = find_device(figures[0].recipe.card), figures[0].torch_version
        if version is not None:
            device = with_torch(device, version)
        trace = trace_loop(loop, device)
        train = footprint_on(trace, device, torch_version=version).phases["train"]
    except Exception as error:  # a net's own code may raise anything; the table goes on without it
        return Untraced(
            name=figures[0].model, why=f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:200]}"
        )
    spread = (train.process_bytes_low / train.process_bytes, train.process_bytes_high / train.process_bytes)
    others = estimators.by_parameters(trace, loop) | estimators.by_mem_tracker(loop)
    group_figures = []
    for figure in figures:
        metric = figure.recipe.metric
        predicted = getattr(train, f"{metric}_bytes")
        group_figures.append(
            FigureAnswer(
                figure=figure,
                net_kind=trace.net_kind,
                predicted=predicted,
                low=int(predicted * spread[0]),
                high=int(predicted * spread[1]),
                estimates=others,
            )
        )
    return group_figures


def statistics(rows: Sequence[FigureAnswer]) -> dict[str, Any]:
    """Errors of these rows, and of the estimators beside."""
    if not rows:
        return {"rows": 0}
    sizes = np.abs([row.error for row in rows])
    answer = {
        "rows": len(rows),
        "median": float(np.median(sizes)),
        "p90": float(np.percentile(sizes, 90)),
        "p95": float(np.percentile(sizes, 95)),
        "worst_under": float(max(0.0, *(-row.error for row in rows))),
        "coverage": sum(row.low <= row.figure.measured <= row.high for row in rows) / len(rows),
    }
    for name in estimators.ESTIMATORS:
        others = [abs(row.estimates[name] / row.figure.measured - 1) for row in rows if name in row.estimates]
        answer[f"{name}_rows"] = len(others)
        answer[f"{name}_median"] = float(np.median(others)) if others else None
        answer[f"{name}_p90"] = float(np.percentile(others, 90)) if others else None
    return answer
