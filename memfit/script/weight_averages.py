"""Finds averages of weights (EMA) in a script: copies of trained tensors that it updates between steps.

An average is updated in place after a step, by the operators of ``_UPDATES``, and has the size of a trained tensor, or
twice as much where weights are of 16 bits. A buffer that sums gradients is set to zero; an average never is. Averages
that are made anew in each step (``shadow = 0.9 * shadow + 0.1 * weight``) are not found.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, MutableSequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from memfit.torch_compat.attributes import schema_of

_UPDATES = frozenset(
    {
        "aten::lerp_", "aten::mul_", "aten::add_", "aten::sub_", "aten::copy_", "aten::_foreach_lerp_",
        "aten::_foreach_mul_", "aten::_foreach_add_", "aten::_foreach_sub_", "aten::_foreach_copy_",
    }
)  # fmt: skip
_RESETS = frozenset({"aten::zero_", "aten::fill_", "aten::_foreach_zero_"})
_OTHER_STATE = frozenset({"gradients", "optimizer", "communication"})


@dataclass(kw_only=True)
class WeightAverages:
    """Watches operators between steps. ``number_of`` returns the number of a tensor's storage."""

    number_of: Callable[[Tensor], int | None]
    _updated: set[int] = field(default_factory=set)
    _reset: set[int] = field(default_factory=set)

    def see(self, func: Any, args: Any) -> None:
        """Notes the tensors that an operator writes to."""
        name = schema_of(func).name
        written = self._updated if name in _UPDATES else self._reset if name in _RESETS else None
        if written is None:
            return
        for tensor in args[0] if isinstance(args[0], list | tuple) else args[:1]:
            number = self.number_of(tensor)
            if number is not None:
                written.add(number)

    def categorise(
        self, category: MutableSequence[str | None], nbytes: list[int], trained: Iterable[int],
        made_in: Callable[[int], str],
    ) -> None:  # fmt: skip
        """Writes ``ema`` to ``category`` for each storage of an average, and ``gradients`` for each sum of gradients.

        Args:
            category: of each storage.
            nbytes: of each storage.
            trained: the storages of the parameters that an optimizer steps.
            made_in: the part of a window in which a storage was made. What a backward made sums gradients, as FSDP2
                does where a schedule scatters them after its last backward.
        """
        weights = set(trained)
        sizes = {nbytes[number] for number in weights} | {2 * nbytes[number] for number in weights}
        for number in self._updated - self._reset - weights:
            if nbytes[number] in sizes and category[number] not in _OTHER_STATE:
                category[number] = "gradients" if made_in(number) == "backward" else "ema"
