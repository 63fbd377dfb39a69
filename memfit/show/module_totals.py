"""What is alive at a moment, by the module that asked for it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from memfit.events import ALLOCATE, CATEGORIES, FREE, Trace

ELSEWHERE = "outside of any module"
ITSELF = " itself"
"""Ends the row of what a module that is opened asked for outside of its children."""
WIDE, NARROW = 0.15, 0.005
"""Parts of all bytes: above the first a module is opened, below the second it is counted with the others."""


@dataclass(frozen=True, kw_only=True)
class ModuleRow:
    """Bytes of one module (with all that is inside of it)."""

    module: str
    total: int
    categories: dict[str, int]
    """Only those that are there."""


def module_totals(
    trace: Trace, event: int, state: Mapping[str, Mapping[str, int]] | None = None, most: int = 20
) -> list[ModuleRow]:
    """The largest modules just after an event, and one row for the rest; the rows sum to all that is alive.

    The tree of modules is opened at every branch that holds more than ``WIDE`` of all, where the rows stay ``most``.

    Args:
        state: bytes of parameters, frozen and buffers by module path and category: a trace does not say whose those
            are that the setup makes. A category is used where it adds up to what the trace has of it.
    """
    leaves = _alive(trace, event)
    _spread_state(leaves, state or {})
    rows = _open_up(leaves, most)
    named = [ModuleRow(module=name, total=sum(sums.values()), categories=sums) for name, sums in rows.items()]
    return _rest_as_one(sorted((row for row in named if row.total), key=lambda row: (-row.total, row.module)))


def _rest_as_one(rows: list[ModuleRow]) -> list[ModuleRow]:
    all_bytes = sum(row.total for row in rows)
    small = [row for row in rows if row.total < NARROW * all_bytes]
    if len(small) < 2:
        return rows
    sums: dict[str, int] = {}
    for row in small:
        for category, nbytes in row.categories.items():
            sums[category] = sums.get(category, 0) + nbytes
    rest = ModuleRow(module=f"{len(small)} smaller rows", total=sum(sums.values()), categories=sums)
    return [*rows[: len(rows) - len(small)], rest]


def _alive(trace: Trace, event: int) -> dict[str, dict[str, int]]:
    kind, storage = trace.kind[: event + 1], trace.storage[: event + 1]
    alive = np.zeros(len(trace.nbytes), bool)
    alive[storage[kind == ALLOCATE]] = True
    alive[storage[kind == FREE]] = False
    module = trace.operator_module[trace.made_by[alive]]
    sums = np.zeros((len(trace.modules), len(CATEGORIES)), np.int64)
    np.add.at(sums, (module, trace.category[alive]), trace.nbytes[alive])
    by_module: dict[str, dict[str, int]] = {}
    for row in np.flatnonzero(sums.any(1)):
        for code in np.flatnonzero(sums[row]):
            entry = by_module.setdefault(trace.modules[row], {})
            entry[CATEGORIES[code]] = entry.get(CATEGORIES[code], 0) + int(sums[row, code])
    return by_module


def _spread_state(leaves: dict[str, dict[str, int]], state: Mapping[str, Mapping[str, int]]) -> None:
    nowhere = leaves.get("", {})
    for category in ("parameters", "frozen", "buffers"):
        known = {module: entry[category] for module, entry in state.items() if entry.get(category)}
        if not known or sum(known.values()) != nowhere.get(category):
            continue
        del nowhere[category]
        for module, nbytes in known.items():
            leaves.setdefault(module, {})[category] = nbytes


def _open_up(leaves: dict[str, dict[str, int]], most: int) -> dict[str, dict[str, int]]:
    """Rows by module path: what lies outside of any module, then the heaviest branches, opened as far as it fits."""
    rows = {ELSEWHERE: dict(leaves.get("", {}))}
    branches = _children(leaves, "")
    total = sum(sum(entry.values()) for entry in leaves.values())
    while True:
        openable = [path for path in branches if _weight(leaves, path) > WIDE * total and _children(leaves, path)]
        if not openable:
            break
        widest = max(openable, key=lambda path: _weight(leaves, path))
        inner = _children(leaves, widest)
        if len(branches) + len(inner) - 1 > most:
            break
        branches = [path for path in branches if path != widest] + inner
        if widest in leaves:
            rows[f"{widest}{ITSELF}"] = leaves[widest]
    for path in branches:
        rows[path] = _sum(leaves, path)
    return rows


def _children(leaves: Mapping[str, object], path: str) -> list[str]:
    """Paths one level inside of ``path`` under which something is; levels with a single child are passed over."""
    start = f"{path}." if path else ""
    inside = [name for name in leaves if name.startswith(start) and name and name != path]
    paths = list(dict.fromkeys(start + name[len(start) :].split(".")[0] for name in inside))
    if len(paths) == 1 and paths[0] not in leaves:
        return _children(leaves, paths[0]) or paths
    return paths


def _sum(leaves: Mapping[str, dict[str, int]], path: str) -> dict[str, int]:
    sums: dict[str, int] = {}
    for name, entry in leaves.items():
        if name == path or name.startswith(path + "."):
            for category, nbytes in entry.items():
                sums[category] = sums.get(category, 0) + nbytes
    return sums


def _weight(leaves: Mapping[str, dict[str, int]], path: str) -> int:
    return sum(_sum(leaves, path).values())
