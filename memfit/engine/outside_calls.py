"""Modules of a sharded block that are called while the block's own forward does not run.

FSDP2 gathers a block's parameters around its forward alone. A net may call a layer of a block by itself (diffusers'
``DiTTransformer2DModel`` calls an embedding of its first block for its last layer), and a loss may call a module of a
net. Such a call counts here as one more forward of the block: it gathers the block's parameters, drops them after it,
and gathers them again for its backward. FSDP2 adds up the gradients of several forwards of a block.

Left out: parameters that are read without a call of a module that holds them.
"""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.distributed.fsdp import FSDPModule

from memfit.engine.container_sync import ContainerSync
from memfit.torch_compat.attributes import own_parameters
from memfit.torch_compat.distributed import begin_fsdp_forward, end_fsdp_forward


class OutsideCalls:
    """The calls of one block and of the modules in it.

    Args:
        net: the sharded net that holds the block, or is the block.
        block: a module of it that gathers its parameters.
    """

    def __init__(self, net: nn.Module, block: nn.Module) -> None:
        self._net, self._block = net, block
        self._running = 0
        self._containers = ContainerSync()

    def watch(self) -> None:
        """After the net was sharded: the block is gathered for calls of the modules that hold its parameters."""
        self._block.register_forward_pre_hook(self._enter, prepend=True)
        self._block.register_forward_hook(self._leave, always_call=True)
        for module in dict.fromkeys(gathered_with(self._block)):
            module.register_forward_pre_hook(self._gather, prepend=True, with_kwargs=True)
            module.register_forward_hook(self._drop)
            module.register_forward_hook(self._leave, always_call=True)

    def _enter(self, module: nn.Module, args: Any) -> None:
        self._running += 1

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        """Also after an error: a recomputed forward ends with one as soon as it has what was asked."""
        self._running -= 1
        if self._running == 0 and module is not self._block:
            self._containers.leave(module, args, output)

    def _gather(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        self._running += 1
        if self._running > 1:
            return None
        self._containers.before(module, args, kwargs)
        replaced = begin_fsdp_forward(self._net, self._block, args, kwargs)
        self._containers.after(module, *replaced)
        return replaced

    def _drop(self, module: nn.Module, args: Any, output: Any) -> Any:
        if self._running > 1:
            return None
        return end_fsdp_forward(self._block, args, output)


def gathered_with(block: nn.Module) -> list[nn.Module]:
    """Modules of a sharded block that hold parameters which it gathers, without itself and the sharded blocks in it.
    A module that it holds twice is there twice."""
    modules = [module for module in block.children() if not isinstance(module, FSDPModule)]
    inner = {module: gathered_with(module) for module in modules}
    return [each for module in modules for each in ([module] * _holds(module, inner[module]) + inner[module])]


def _holds(module: nn.Module, inner: list[nn.Module]) -> bool:
    return bool(inner) or any(parameter is not None for parameter in own_parameters(module).values())
