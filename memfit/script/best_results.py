"""Conditions such as ``if score > best: best = score``: a trace takes each result for better than the one before it.

A trace has no data, so that all results of a validation are the same number, and only the first one would be the best.
In a real run results improve, and what a script does then, such as a copy of the weights beside the last one, needs
memory.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from dataclasses import dataclass, field
from numbers import Integral, Real
from typing import Any

from torch import Tensor

from memfit.script.intervals import EarlyCondition
from memfit.torch_compat import FakeTensor

_ORDERS = {"Lt": operator.lt, "Gt": operator.gt, "LtE": operator.le, "GtE": operator.ge}


@dataclass(kw_only=True)
class BestResults:
    """Answers the conditions. ``allows`` asks for a place whether one may hold that does not by itself; ``validated``
    tells whether a validation has run since the last step.
    """

    allows: Callable[[str], bool] = lambda where: True
    validated: Callable[[], bool] = lambda: True
    improved: list[EarlyCondition] = field(default_factory=list)

    def improves(
        self, left: Any, right: Any, best: Any, order: str, side: int, answer: bool, where: str, text: str, *result: Any
    ) -> Any:
        """The value of a comparison, or ``answer`` where the result is the same number as the best one so far.

        Args:
            best: the best result so far, which is a part of one side.
            order: the name of the comparison in ``ast``.
            side: the side that is the result: 0 for ``left``, 1 for ``right``.
            answer: the comparison's value where the result is better.
            result: the result where it is a part of a side.
        """
        given = result[0] if result else (left, right)[side]
        if not self._is_next_best(given, best) or not self.allows(where):
            return _ORDERS[order](left, right)
        if not (_is_unknown(given) or _is_unknown(best)) and bool(holds := _ORDERS[order](left, right)) is answer:
            return holds
        condition = EarlyCondition(where=where, text=text, answer=answer)
        if condition not in self.improved:
            self.improved.append(condition)
        return answer

    def _is_next_best(self, result: Any, best: Any) -> bool:
        """Whether a result is taken for better than the best one: a trace has the same number for both, or none."""
        if _is_unknown(result) or _is_unknown(best):
            return True
        result, best = _number(result), _number(best)
        if result is None or best is None or result != best or not math.isfinite(result):
            return False
        # Without a validation, it is such as the most rows of a batch, for which a script keeps a buffer.
        return not isinstance(result, Integral) or self.validated()


def _number(value: Any) -> Any:
    """A number of Python or NumPy, or that of a tensor of one element; None for other values, and truth values."""
    if isinstance(value, Tensor):
        value = None if isinstance(value, FakeTensor) or value.numel() != 1 else value.item()
    return value if isinstance(value, Real) and not isinstance(value, bool) else None


def _is_unknown(value: Any) -> bool:
    """Whether it is a number on the device, which a trace does not know."""
    return isinstance(value, FakeTensor) and value.numel() == 1 and value.is_floating_point()
