"""What following known values asks of an operator, whatever it is called with: what it writes to, fills and checks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from memfit.torch_compat.attributes import schema_of
from memfit.trace.collectives import is_collective
from memfit.trace.filled_tensors import FILLS, PUTS
from memfit.trace.finite_checks import CHECKS

_aten = torch.ops.aten
_WEIGHTS = frozenset({_aten.zeros.default, _aten.ones.default, _aten.full.default, _aten.eye.default})
"""Where they make several floating point numbers, these are a net's weights or an optimizer's state: not followed."""
_SAME_ON_ALL = ("all_reduce", "allreduce_", "broadcast", "wait_tensor")
"""Collectives whose results every rank has; a simulated rank keeps its own value. Of all others they are unknown."""
_GATHERS = ("allgather_", "_allgather_base_", "all_gather_into_tensor")
UNKNOWN_EFFECT = torch.Tag.nondeterministic_seeded
"""The tag of operators that draw random numbers."""


@dataclass(frozen=True, kw_only=True, slots=True)
class OperatorPart:
    """What following asks of an operator whatever it is called with."""

    func: Any
    written: tuple[int, ...]
    """Positions of the arguments that it writes to."""
    checks: bool
    """Whether it may check that numbers are finite."""
    makes_weights: bool
    is_unknown: bool
    """Whether its result does not follow from its arguments."""
    fills: bool
    puts: bool
    receives: bool
    """Whether its first argument is written to by other ranks, which the schemas of ``c10d`` do not say."""
    gathers: bool


_parts: dict[int, OperatorPart] = {}
"""By the id of an operator, whose own hash is computed in Python."""


def part_of(func: Any) -> OperatorPart:
    """What following asks of this operator; read from its schema once."""
    part = _parts.get(id(func))
    if part is None:
        numbered = enumerate(schema_of(func).arguments) if schema_of(func).is_mutable else ()
        name = schema_of(func).name.rpartition("::")[2]
        from_others = is_collective(func) and not name.startswith(_SAME_ON_ALL)
        part = _parts[id(func)] = OperatorPart(
            func=func,
            written=tuple(
                i for i, argument in numbered if argument.alias_info is not None and argument.alias_info.is_write
            ),
            checks=func in CHECKS,
            makes_weights=func in _WEIGHTS,
            fills=func in FILLS,
            puts=func in PUTS,
            is_unknown=UNKNOWN_EFFECT in func.tags or from_others,
            receives=from_others and func.namespace == "c10d" and name.endswith("_"),
            gathers=from_others and name in _GATHERS,
        )
    return part
