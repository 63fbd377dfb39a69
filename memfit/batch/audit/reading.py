"""Data sets that give another sample than was asked for, seen by reading samples that carry their id.

Only samples with an id are read on, and only for a few seconds: a loader whose data says nothing of itself, and a data
set that cannot be read here, show nothing. What this does not see: a replaced sample that carries the id asked for.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Mapping
from typing import Any

from memfit.batch.audit.group import Exchange, as_rank, quiet
from memfit.batch.audit.ids import SURE_NAMES, named_id
from memfit.batch.audit.parts import data_set_of
from memfit.batch.audit.target import is_loop, load_target

PROBES, SECONDS = 16, 5.0


def replaced_samples(target: str | Callable[..., Any]) -> str | None:
    """What was seen, where a map-style data set gives other samples than asked for; None where it does not."""
    with as_rank(0, 1, Exchange(1)), quiet():
        function = load_target(target) if isinstance(target, str) else target
        if is_loop(function):
            return None
        dataset = data_set_of(function(0, 1))
        if dataset is None or not hasattr(dataset, "__len__"):
            return None
        plain, named = _read(dataset)
    wrong = [(index, number) for index, number in plain.items() if number != index]
    if len(plain) < 2 or len(wrong) > 0.5 * len(plain):
        wrong = [(index, name) for index, name in named.items() if name != index]
    if len(named) > 1 and len(wrong) > 0.5 * len(named):
        wrong = _repeated(named)
    if not wrong:
        return None
    shown = ", ".join(f"{index} gives {name}" for index, name in wrong[:4])
    asked = max(len(plain), len(named))
    return f"The data set gives another sample than was asked for {len(wrong)} times in {asked} ({shown})."


def _read(dataset: Any) -> tuple[dict[int, Hashable], dict[int, Hashable]]:
    """For each index asked for: the number that came, where a sample is a number; the id, where it has such a field."""
    plain: dict[int, Hashable] = {}
    named: dict[int, Hashable] = {}
    until = time.monotonic() + SECONDS
    for index in range(len(dataset)):
        try:
            sample = dataset[index]
        except Exception:
            sample = None
        fields = [sample[name] for name in SURE_NAMES if name in sample] if isinstance(sample, Mapping) else []
        if fields and (name := named_id(fields[0])) is not None:
            named[index] = name
        elif not isinstance(sample, Mapping) and (name := named_id(sample)) is not None:
            plain[index] = name
        if (index == PROBES and not plain and not named) or time.monotonic() > until:
            break
    return plain, named


def _repeated(named: dict[int, Hashable]) -> list[tuple[int, Hashable]]:
    """Ids that came before under another index; none where ids do not tell samples apart."""
    first: dict[Hashable, int] = {}
    for index, name in named.items():
        first.setdefault(name, index)
    if len(first) < 0.5 * len(named):
        return []
    return [(index, name) for index, name in named.items() if first[name] != index]
