"""Margins: how far measured runs lay from their predictions, by kind of net.

margins.toml is written by bench/accuracy.py --fit. A margin is the shortest interval that holds 99 % of the measured
runs of its kind, of which the readings that show cuDNN's trials, no need of the run, are left out beforehand: with
those, it holds 95 % of all.

In a net whose prediction depends on the workspaces of convolutions, the interval reaches further: to the replay with
twice these workspaces, and above it by the margin of nets that have none (``WITHOUT_WORKSPACES``).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from importlib.resources import files

from memfit import toml

WITHOUT_WORKSPACES = "attention, float32"
"""The measured kind of net without convolutions that take a workspace: its errors are those of all else."""


@dataclass(frozen=True, kw_only=True)
class Margin:
    """Bounds of measured over predicted process bytes, minus 1; and how many runs they are from (0: none like it)."""

    low: float = 0.0
    high: float = 0.0
    runs: int = 0


@cache
def margins() -> dict[str, Margin]:
    """The measured kinds of nets, as ``Trace.net_kind`` calls them."""
    tables = toml.loads(files("memfit.replay").joinpath("margins.toml").read_text("utf-8"))
    return {kind: Margin(low=table["low"], high=table["high"], runs=table["runs"]) for kind, table in tables.items()}


def margin_of(net_kind: str) -> Margin:
    """The kind's own margin; of a kind that was never measured, the widest there is, from 0 runs."""
    known = margins()
    if net_kind in known:
        return known[net_kind]
    low, high = (
        min(known_margin.low for known_margin in known.values()),
        max(known_margin.high for known_margin in known.values()),
    )
    return Margin(low=low, high=high)
