"""The weights that the forward of a net takes: its parameters, or those that ``torch.func`` puts in their place."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor, nn

from memfit.torch_compat.attributes import without_transforms


def weights_of(net: nn.Module) -> Iterator[Tensor]:
    """The parameters of a net. Within ``vmap`` over an ensemble, the stacked weights of all nets, which the script
    trains."""
    return map(without_transforms, net.parameters())


def has_trained(net: nn.Module) -> bool:
    """Whether any of the weights requires a gradient."""
    return any(weight.requires_grad for weight in weights_of(net))
