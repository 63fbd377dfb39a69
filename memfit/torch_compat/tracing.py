"""torch's private names that the virtual device alone needs; they take torch a second to import."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from memfit.torch_compat.versions import lacks

try:
    import torch._meta_registrations as shape_functions
    import torch.optim.optimizer as optimizer_module
    import torch.utils._foreach_utils as foreach_module
    from torch._C import _len_torch_function_stack as number_of_modes
    from torch._decomp import meta_table as python_shape_functions
    from torch._dynamo import eval_frame, trace_rules
    from torch.overrides import _pop_mode_temporarily as mode_popped

    callback_of_stance = eval_frame._callback_from_stance
    """dynamo's callback of a call -> the one that the stance leaves: None where the call runs as it was written."""
except (ImportError, AttributeError) as error:
    raise lacks(error) from error


def foreach_types() -> tuple[list[Any], list[Any]]:
    """The lists of classes of tensors on which optimizers run for-each operators."""
    return optimizer_module._foreach_supported_types, foreach_module._foreach_supported_types


def without_newest_mode(function: Callable[..., Any]) -> Callable[..., Any]:
    """``function``, answered as if the newest mode for torch functions had not been entered."""

    def call(*args: Any) -> Any:
        with mode_popped() if number_of_modes() else contextlib.nullcontext():
            return function(*args)

    return call


@contextlib.contextmanager
def eager_calls_noted(note: Callable[[], None]) -> Iterator[None]:
    """A context in which ``note`` is called at each call of what was compiled that runs as it was written."""

    def noted(callback: Any) -> Any:
        left = callback_of_stance(callback)
        if left is None and callback:  # neither None nor False, with which dynamo compiles nothing
            note()
        return left

    eval_frame._callback_from_stance = noted
    try:
        yield
    finally:
        eval_frame._callback_from_stance = callback_of_stance


__all__ = [
    "eager_calls_noted", "foreach_types", "python_shape_functions", "shape_functions", "trace_rules",
    "without_newest_mode",
]  # fmt: skip
