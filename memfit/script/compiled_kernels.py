"""Kernels that a library compiles for the card at run time: those of DeepSpeed's optimizers, and those of Triton.

A trace cannot compile them. It replaces kernels whose memory is known from their documented interface.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import Tensor

from memfit.device.virtual import managed_memory
from memfit.device.virtual.hybrid_mode import HybridMode
from memfit.script.import_hooks import on_import
from memfit.script.tracer import ScriptTracer
from memfit.script.triton_launches import triton_launches
from memfit.torch_compat.triton_kernels import pass_triton_kernels


def _noting(get_paged: Callable[..., Tensor], note: Callable[[str], None]) -> Callable[..., Tensor]:
    def noting(*shape: int, **kwargs: Any) -> Tensor:
        note(
            "paged optimizer state is managed memory: it was counted as the host's, and the driver keeps of it on the "
            "card what the rest leaves free"
        )
        return get_paged(*shape, **kwargs)

    return noting


class _Kernels:
    """A compiled extension whose functions change tensors in place and return nothing."""

    def __getattr__(self, name: str) -> Callable[..., None]:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *args, **kwargs: None


@contextmanager
def compiled_kernels(note: Callable[[str], None]) -> Iterator[None]:
    """Context in which the extensions that DeepSpeed compiles run without their kernels, and paged optimizer state of
    bitsandbytes is noted.

    Args:
        note: called with each kernel that was replaced.
    """

    def load(builder: Any, verbose: bool = True) -> Any:
        note(f"DeepSpeed's kernels {builder.name!r} were not run: they are assumed to work in place")
        return _Kernels()

    for mode in (HybridMode, ScriptTracer):
        pass_triton_kernels(mode)
    with ExitStack() as stack:

        def paged(module: Any) -> tuple[Any, dict[str, Any]]:
            known = hasattr(module, "get_paged")
            return module, {"get_paged": _noting(module.get_paged, note)} if known else {}

        builder = {"deepspeed.ops.op_builder.builder": lambda m: (m.OpBuilder, {"load": load})}
        stack.enter_context(triton_launches(note))
        stack.enter_context(on_import({managed_memory.MODULE: paged, **builder}))
        yield
