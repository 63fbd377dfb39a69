"""Data sets that give another sample than was asked for, seen by reading samples that carry their id.

Only samples with an id are read on, and only for a few seconds: a loader whose data says nothing of itself, and a data
set that cannot be read here, show nothing. What this does not see: a replaced sample that carries the id asked for.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable
from typing import Any

from memfit.batch.audit.group import Exchange, as_rank
from memfit.batch.audit.ids import named_id
from memfit.batch.audit.parts import data_set_of
from memfit.batch.audit.target import is_loop, load_target

PROBES, SECONDS = 16, 5.0


def replaced_samples(target: str | Callable[..., Any]) -> str | None:
    """What was seen, where a map-style data set gives other samples than asked for; None where it does not."""
    with as_rank(0, 1, Exchange(1)):
        function = load_target(target) if isinstance(target, str) else target
        if is_loop(function):
            return None
        dataset = data_set_of(function(0, 1))
        if dataset is None or not hasattr(dataset, "__len__"):
            return None
        named = _names(dataset)
    if not named:
        return None
    return _judge(named)


def _names(dataset: Any) -> dict[int, Hashable]:
    """Index asked for, and the id that came; empty where samples carry no id of their own."""
    found: dict[int, Hashable] = {}
    until = time.monotonic() + SECONDS
    for index in range(len(dataset)):
        try:
            name = named_id(dataset[index])
        except Exception:
            name = None
        if name is not None:
            found[index] = name
        if (index == PROBES and len(set(found.values())) < PROBES // 2) or time.monotonic() > until:
            break
    return found


def _judge(named: dict[int, Hashable]) -> str | None:
    asked = len(named)
    others = [(index, name) for index, name in named.items() if name != index]
    if len(others) <= 0.5 * asked:
        wrong = others
    else:
        first: dict[Hashable, int] = {}
        for index, name in named.items():
            first.setdefault(name, index)
        if len(first) < 0.5 * asked:
            return None
        wrong = [(index, name) for index, name in named.items() if first[name] != index]
    if not wrong:
        return None
    shown = ", ".join(f"{index} gives {name}" for index, name in wrong[:4])
    return f"The data set gives another sample than was asked for {len(wrong)} times in {asked} ({shown})."
