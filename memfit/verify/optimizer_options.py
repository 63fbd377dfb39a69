"""Whether the optimizers of all ranks have the same options: a learning rate by rank trains other weights on each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from memfit.verify.findings import VerifyFinding

Options = dict[str, list[dict[str, Any]]]
"""By optimizer, the numbers, texts and tuples of each of its groups."""


def options_of(optimizers: Mapping[str, Optimizer]) -> Options:
    """The options of these optimizers."""
    return {
        name: [{key: _plain(value) for key, value in group.items() if _is_option(key, value)} for group in groups]
        for name, groups in ((name, optimizer.param_groups) for name, optimizer in optimizers.items())
    }


def other_options(ranks: Sequence[Options]) -> list[VerifyFinding]:
    """Of each optimizer, the first option that is not the same on all ranks.

    Args:
        ranks: the options of every rank.
    """
    findings = []
    for name, groups in ranks[0].items():
        for rank, options in enumerate(ranks[1:], 1):
            difference = _difference(groups, options.get(name, []))
            if difference is not None:
                key, mine, theirs = difference
                text = (
                    f"optimizer {name} has {key} = {mine} on rank 0 and {theirs} on rank {rank}: each rank then learns "
                    "other weights; give every rank the same, whatever its rank"
                )
                findings.append(VerifyFinding(code="rank_options", kind="fault", text=text))
                break
    return findings


def _difference(mine: list[dict[str, Any]], theirs: list[dict[str, Any]]) -> tuple[str, Any, Any] | None:
    """(option, its value here, and there) of the first that differs."""
    if len(mine) != len(theirs):
        return "groups", len(mine), len(theirs)
    for here, there in zip(mine, theirs, strict=True):
        for key in sorted(here.keys() | there.keys()):
            if here.get(key) != there.get(key):
                return key, here.get(key), there.get(key)
    return None


def _is_option(key: str, value: Any) -> bool:
    return key != "params" and (isinstance(value, int | float | str | tuple) or _is_number(value))


def _is_number(value: Any) -> bool:
    return isinstance(value, Tensor) and value.numel() == 1


def _plain(value: Any) -> Any:
    if isinstance(value, tuple):
        return tuple(_plain(part) for part in value)
    return float(value) if _is_number(value) else value
