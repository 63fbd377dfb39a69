"""torch's column-wise and row-wise cut for modules that are linear layers of their own making (``product_layers``).

Their forward runs on DTensors, as that of ``nn.Linear`` under torch's ``ColwiseParallel`` and ``RowwiseParallel``: it
sees the sizes of one device, and the product follows from DTensor's own rules, whichever way the matrix lies.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ParallelStyle

from memfit.engine.fused_projection import exchanged
from memfit.engine.local_parameters import LocalParameters
from memfit.engine.product_layers import ProductLayer
from memfit.torch_compat.attributes import own_parameters
from memfit.torch_compat.distributed import OWN_VALUES


class ProductColwise(ParallelStyle):
    """Each rank has a part of the outputs, which follows from a whole input.

    Args:
        layer: how the module holds its matrix.
        parts: how many tensors of one size the output is, side by side; each rank has a piece of every one.
    """

    def __init__(self, layer: ProductLayer, *, parts: int = 1) -> None:
        super().__init__()
        self.layer, self.parts = layer, parts

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        """Called by ``parallelize_module``."""
        _distribute(module, device_mesh, self.layer, of_outputs=True)
        module.register_forward_pre_hook(partial(_enter, device_mesh, Replicate()))
        module.register_forward_hook(partial(_leave, Shard(-1)))
        if self.parts > 1:
            _ExchangedParameters(self.layer, self.parts, device_mesh).watch(module)
        return module


class ProductRowwise(ParallelStyle):
    """Each rank has a part of the input, and the sum over the ranks is the output.

    Args:
        layer: how the module holds its matrix.
    """

    def __init__(self, layer: ProductLayer) -> None:
        super().__init__()
        self.layer = layer

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        """Called by ``parallelize_module``."""
        _distribute(module, device_mesh, self.layer, of_outputs=False)
        module.register_forward_pre_hook(partial(_enter, device_mesh, Shard(-1)))
        module.register_forward_hook(partial(_leave, Replicate()))
        return module


def _distribute(module: nn.Module, mesh: DeviceMesh, layer: ProductLayer, *, of_outputs: bool) -> None:
    for key, parameter in own_parameters(module).items():
        if parameter is not None:
            dimension = layer.dimension(key, of_outputs=of_outputs)
            placement = Replicate() if dimension is None else Shard(dimension)
            cut = distribute_tensor(parameter.data, mesh, [placement], **OWN_VALUES)
            module.register_parameter(key, nn.Parameter(cut, requires_grad=parameter.requires_grad))


def _enter(mesh: DeviceMesh, placement: Any, module: nn.Module, args: Any) -> Any:
    return (DTensor.from_local(args[0], mesh, [placement], run_check=False), *args[1:])


def _leave(placement: Any, module: nn.Module, args: Any, output: Any) -> Tensor:
    local: Tensor = output.redistribute(placements=[placement]).to_local()
    return local


class _ExchangedParameters(LocalParameters):
    """In the module's forward, a rank's piece of the matrix for each of several outputs.

    It comes from the ranks that hold the columns (``fused_projection``). The forward sees a DTensor of the shape of
    one device, whose columns have another order; nothing in it mixes them.
    """

    def __init__(self, layer: ProductLayer, parts: int, mesh: DeviceMesh) -> None:
        super().__init__()
        self._layer, self._parts, self._mesh = layer, parts, mesh

    def exchange(self, module: nn.Module) -> Callable[[], None]:
        """As of ``LocalParameters``."""
        own: dict[str, Any] = own_parameters(module)
        held = {key: value for key, value in own.items() if isinstance(value, DTensor)}
        for key, parameter in held.items():
            dimension = self._layer.dimension(key, of_outputs=True)
            assert dimension is not None
            rows = parameter.to_local().transpose(0, dimension).contiguous()
            pieces = exchanged(self._mesh, self._parts, rows).transpose(0, dimension)
            own[key] = DTensor.from_local(pieces, self._mesh, [Shard(dimension)], run_check=False)
        return lambda: own.update(held)
