"""torch's ``context_parallel`` with the attention of the CPU beside that of CUDA.

torch runs attention over ranks that hold parts of a sequence as a ring around one kernel: keys and values of the other
ranks pass through, and what each gives is merged. It has such rings for three kernels of CUDA; the CPU's kernel, which
takes and gives the same, is run by the same ring here.

Source: ``torch.distributed.tensor.experimental._context_parallel._attention``.
"""

from __future__ import annotations

import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.nn import functional

from memfit.errors import InputError
from memfit.installation import release_number

OLDEST = (2, 13)
"""The first version whose rings were compared with one rank."""
_SEQUENCE = 2
"""The dimension of a sequence in what attention is given: (batch, heads, sequence, features)."""
_FORWARD = ("query", "key", "value", "dropout_p", "is_causal", "attn_mask", "scale")
_BACKWARD = (
    "grad_out", "query", "key", "value", "out", "logsumexp", "dropout_p", "is_causal", "attn_mask", "scale",
)  # fmt: skip
"""Arguments of the CPU's kernel."""


def check_context_parallel() -> None:
    """Raises InputError where torch is older than ``OLDEST``, or lacks what memfit uses of its rings."""
    where = f"cp on torch {torch.__version__}"
    if release_number(torch.__version__) < OLDEST:
        raise InputError(where, "its rings were not compared with one rank", "install torch 2.13, or leave cp out")
    rings = _rings()
    for name in ("custom_ops", "_cp_options", "_templated_ring_attention", "_templated_ring_attention_backward"):
        if not hasattr(rings, name):
            why = f"its context parallelism has no {name}, which memfit uses"
            raise InputError(where, why, "install torch 2.13, or leave cp out")


@contextmanager
def divided_sequences(
    mesh: DeviceMesh, buffers: Sequence[Tensor], dimensions: Sequence[int], kept: Sequence[Tensor], *, balanced: bool
) -> Iterator[None]:
    """Context in which each of some tensors has the rank's part of its sequence, and attention sees the whole one.

    Args:
        mesh: of one dimension.
        buffers: cut in place.
        dimensions: of the sequence in each buffer.
        kept: those of the buffers that are whole again afterwards.
        balanced: each rank has a part of the sequence's beginning and the one as far from its end, so that under
            causal attention all compute as much.
    """
    from torch.distributed.tensor.experimental import context_parallel

    rings = _rings()
    rings.custom_ops[torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default] = partial(_forward, mesh)
    rings.custom_ops[torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default] = partial(
        _backward, mesh
    )
    options, before = rings._cp_options, rings._cp_options.enable_load_balance
    whole = {id(tensor) for tensor in kept}
    cut = {tensor for tensor in buffers if id(tensor) not in whole}
    options.enable_load_balance = balanced
    try:
        with context_parallel(mesh, buffers=list(buffers), buffer_seq_dims=list(dimensions), no_restore_buffers=cut):
            yield
    finally:
        options.enable_load_balance = before


@contextmanager
def without_rings() -> Iterator[None]:
    """Context of forwards in which nothing is computed: attention is torch's own, of a rank's part alone, and no mode
    for functions sees it."""
    rings, inside = _rings(), functional.scaled_dot_product_attention
    if inside not in rings._replaced_functions:
        yield
        return
    name, own = rings._replaced_functions[inside]
    setattr(functional, name, own)
    try:
        with torch._C.DisableTorchFunction():
            yield
    finally:
        setattr(functional, name, inside)


def in_rings(error: BaseException) -> bool:
    """Whether an error was raised by torch's rings, or below them."""
    frames = traceback.walk_tb(error.__traceback__)
    files = {frame.f_code.co_filename for frame, _ in frames}
    return not files.isdisjoint((_rings().__file__, __file__))


def _rings() -> Any:
    from torch.distributed.tensor.experimental._context_parallel import _attention, _sharding_rules  # noqa: F401

    return _attention


def _named(names: Sequence[str], args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments by name as this rank has them, without a mask."""
    given = dict(zip(names, args, strict=False)) | dict(kwargs)
    if given.pop("attn_mask", None) is not None:
        raise RuntimeError("the ring is given a mask")
    return {name: value.to_local() if isinstance(value, DTensor) else value for name, value in given.items()}


def _divided(values: Sequence[Tensor], mesh: DeviceMesh) -> tuple[DTensor, ...]:
    return tuple(DTensor.from_local(value, mesh, [Shard(_SEQUENCE)], run_check=False) for value in values)


def _forward(mesh: DeviceMesh, kernel: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[DTensor, ...]:
    """torch's ring around the CPU's kernel; in the place of DTensor's own rule for it. A DTensor's own mesh may be an
    equal one of before, from DTensor's caches, whose groups are others."""
    given = _named(_FORWARD, args, kwargs)
    ring = _rings()._templated_ring_attention
    return _divided(ring(mesh.get_group(), _SEQUENCE, kernel, **given), mesh)


def _backward(mesh: DeviceMesh, kernel: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[DTensor, ...]:
    """The same of its backward."""
    given = _named(_BACKWARD, args, kwargs)

    def by_position(**values: Any) -> Any:
        scale = values.pop("scale", None)
        return kernel(*(values[name] for name in _BACKWARD if name in values), scale=scale)

    ring = _rings()._templated_ring_attention_backward
    given = {"is_causal": False, "dropout_p": 0.0} | given
    return _divided(ring(mesh.get_group(), _SEQUENCE, by_position, grad_out_name="grad_out", **given), mesh)
