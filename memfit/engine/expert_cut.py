"""Tensor parallelism of mixtures: every expert of a module cut over the ``tp`` ranks of a mesh.

transformers' plan cuts the projection to gates and values (``packed_colwise``) and the one back (``rowwise``), and its
own style (``moe_tp_experts``) sums the outputs over the ranks, and the gradients of what the experts were given.

The layout of ``packed_colwise`` gives a rank a piece of the gates and one of the values, which torch.distributed's
checkpoints do not know (torch 2.13 refuses it: overlapping chunks). So the parameter is a plain Shard(1), whose rows
and checkpoints are those of one device, and ranks exchange columns of the projection's output (all-to-all). Outputs
are exchanged and not weights, as ``fused_projection`` does: weights are those of all experts.

Source: ``transformers.distributed.tensor_parallel``, ``transformers.integrations.moe``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard, distribute_tensor

from memfit.engine.fused_projection import exchanged
from memfit.errors import InputError
from memfit.torch_compat.attributes import own_parameters
from memfit.torch_compat.distributed import OWN_VALUES

EXPERTS_CUT = "moe_tp_experts"
"""transformers' layout of a module whose experts are cut."""
_DIMENSIONS = {"packed_colwise": (1, 2), "rowwise": (2, 1)}
"""By layout of a parameter (experts, out, in): the dimension that is cut, and parts that lie in it side by side."""
_IMPLEMENTATIONS = ("grouped_mm", "batched_mm")
"""transformers' ways to run experts whose gates go through ``_apply_gate``."""

_ROW_BYTES = 16
"""torch._grouped_mm: aten/src/ATen/native/GroupedMMUtils.h, for every type and device."""


def check_experts(seen: str, module: nn.Module, layouts: Mapping[str, str | None], ranks: int, write: str) -> None:
    """Raises InputError where a module's experts cannot be cut.

    Args:
        seen: what the message is about.
        layouts: of the module's own parameters, by name.
        write: what to write instead of cutting it.
    """
    if _style() is None:
        raise InputError(seen, f"the installed transformers has no style {EXPERTS_CUT!r}", "install transformers 5.23")
    way = getattr(getattr(module, "config", None), "_experts_implementation", None)
    if way not in _IMPLEMENTATIONS:
        instead = f"write experts_implementation={_IMPLEMENTATIONS[0]!r} where the net is made"
        raise InputError(seen, f"its experts run by {way!r}, whose gates ranks cannot exchange", instead)
    gates, values_last, transposed = (
        getattr(module, name, None) for name in ("has_gate", "is_concatenated", "is_transposed")
    )
    if not gates or not values_last or transposed:
        raise InputError(seen, "its projection is not gates and values, one after the other", write)
    for name, parameter in own_parameters(module).items():
        if parameter is None:
            continue
        layout = layouts[name]
        if layout not in _DIMENSIONS or parameter.dim() != 3:
            raise InputError(seen, f"the layout {layout!r} of its {name} is not carried", write)
        dimension, parts = _DIMENSIONS[layout]
        if parameter.shape[dimension] % (parts * ranks):
            why = f"{parameter.shape[dimension]} of its {name} does not divide by {parts * ranks}"
            raise InputError(seen, why, "write another tp")
        piece = parameter.shape[dimension] // ranks * parameter.element_size()
        if way == "grouped_mm" and piece % _ROW_BYTES:
            why = f"a rank's rows of its {name} have {piece} bytes, and grouped products take multiples of {_ROW_BYTES}"
            raise InputError(
                seen, why, "write another tp, or experts_implementation='batched_mm' where the net is made"
            )


def cut_experts(module: nn.Module, layouts: Mapping[str, str | None], mesh: DeviceMesh) -> None:
    """Cuts a module's experts in place, after ``check_experts``."""
    for name, parameter in list(own_parameters(module).items()):
        if parameter is not None:
            placement = Shard(_DIMENSIONS[str(layouts[name])][0])
            cut = distribute_tensor(parameter.data, mesh, [placement], **OWN_VALUES)
            module.register_parameter(name, nn.Parameter(cut, requires_grad=parameter.requires_grad))
    experts: Any = module
    experts._apply_gate = _between_ranks(experts._apply_gate, mesh)
    _style().install_forward(module, mesh)


def _style() -> Any:
    """transformers' style of a module whose experts are cut; None where the installed version has none."""
    try:
        from transformers.distributed.tensor_parallel import ALL_PARALLEL_STYLES
    except ImportError:
        return None
    return ALL_PARALLEL_STYLES.get(EXPERTS_CUT)


def _between_ranks(gate: Callable[[Tensor], Tensor], mesh: DeviceMesh) -> Callable[[Tensor], Tensor]:
    """The gate of this rank's piece of gates and values: (rows, 2 width / ranks) to (rows, width / ranks)."""

    def call(neighbouring: Tensor) -> Tensor:
        columns = exchanged(mesh, 2, neighbouring.t().contiguous())
        return gate(columns.t().contiguous())

    return call
