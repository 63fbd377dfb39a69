"""The table of a card that a person adds: which figures it may have, and what each must be."""

from __future__ import annotations

import difflib
from typing import Any

from memfit.errors import InputError
from memfit.installation import release_number

_TEXTS = ("name", "link", "network")
_TRIPLES = ("context_bytes",)
_FIGURES = (
    "multiprocessors", "memory_bytes", "bf16_flops", "fp16_flops", "tf32_flops", "fp32_flops", "bandwidth",
    "board_watts", "link_bytes", "network_bytes", "nccl_bytes",
)  # fmt: skip
_BY_TORCH = "context_by_torch"
_NEEDED = ("name", "compute_capability", "memory_bytes")


def checked_card(where: str, key: str, table: Any) -> dict[str, Any]:
    """The table of a card, with a source for each figure.

    Args:
        where: what messages call the table.
        key: the table's name.

    Raises:
        InputError: it is not a card's.
    """
    known = (*_TEXTS, *_TRIPLES, *_FIGURES, "compute_capability", _BY_TORCH)
    if not isinstance(table, dict):
        raise InputError(where, "not a table", f"write [{key}] above name = …")
    for name in _NEEDED:
        if name not in table:
            raise InputError(where, f"no {name}", f"write {name} = …")
    for name, entry in table.items():
        value: Any = entry.get("value") if isinstance(entry, dict) and name != _BY_TORCH else entry
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            raise InputError(f"{name} in {where}", "no figure of a card", f"write {near[0] if near else known[0]}")
        if name in _TEXTS:
            right, kind = isinstance(value, str) and bool(value), "a text"
        elif name == "compute_capability":
            right, kind = _are_counts(value, 2), "[major, minor]"
        elif name in _TRIPLES:
            right, kind = _is_triple(value), "[low, usual, high] bytes"
        elif name == _BY_TORCH:
            right, kind = _are_triples_by_torch(entry), '{ "2.2" = [low, usual, high] }'
        else:
            right, kind = type(value) in (int, float) and 0 < value < 1e20, "a number above 0"
        if not right:
            raise InputError(f"{name} = {value!r} in {where}", f"not {kind}", f"write {name} = {kind}")
    unsourced = (*_TEXTS, "compute_capability", "multiprocessors", _BY_TORCH)
    sourced = {name: _with_source(entry) for name, entry in table.items() if name not in unsourced}
    if _BY_TORCH in table:
        sourced[_BY_TORCH] = {since: _with_source(each) for since, each in table[_BY_TORCH].items()}
    return table | sourced


def _with_source(entry: Any) -> dict[str, Any]:
    return entry if isinstance(entry, dict) else {"value": entry, "source": "added by you"}


def _are_triples_by_torch(entry: Any) -> bool:
    if not isinstance(entry, dict) or not entry:
        return False
    triples = [_with_source(each).get("value") for each in entry.values()]
    return all(release_number(since) > (0, 0) for since in entry) and all(map(_is_triple, triples))


def _is_triple(value: Any) -> bool:
    return _are_counts(value, 3) and bool(value == sorted(value))


def _are_counts(value: Any, length: int) -> bool:
    return isinstance(value, list) and len(value) == length and all(type(item) is int and item >= 0 for item in value)
