"""What a loss keeps for its backward, counted under FakeTensorMode by saved-tensor hooks, every storage once."""

import functools
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint

from memfit.job import Job, Losses, Nets, Shape


def kept_bytes(loss: Callable[[], object], nets: Nets) -> int:
    """Bytes of the distinct storages that ``loss()`` saves, without parameters and buffers."""
    own = {t.untyped_storage()._cdata for net in nets.values() for t in (*net.parameters(), *net.buffers())}
    storages = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in own:
            storages[storage._cdata] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        result = loss()
    total = sum(storage.nbytes() for storage in storages.values())
    del result
    return total


def recompute(nets: Nets, paths: list[str]) -> None:
    """Every named module checkpointed. Its own inner saves do not happen, so that hooks see what it is given."""
    for path in paths:
        name, _, inner = path.partition(".")
        module: nn.Module = nets[name].get_submodule(inner)
        module.forward = functools.partial(checkpoint, module.forward, use_reentrant=True)  # type: ignore[method-assign]


def kept(job: Job, shape: Shape, checkpointed: bool = False, autocast: bool = False) -> int:
    """Bytes that the job's loss keeps for one micro-batch of this shape."""

    def loss() -> Losses:
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast, cache_enabled=False):
            return job.loss(nets, batch)

    with FakeTensorMode():
        nets, batch = job.nets(), job.batch(shape)
        if checkpointed:
            recompute(nets, job.checkpointable(nets))
        return kept_bytes(loss, nets)
