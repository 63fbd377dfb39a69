"""The private base class of torch's batch normalisation layers, of any number of dimensions."""

from __future__ import annotations

from memfit.torch_compat.versions import lacks

try:
    from torch.nn.modules.batchnorm import _BatchNorm as BatchNormBase
except ImportError as error:
    raise lacks(error) from error

__all__ = ["BatchNormBase"]
