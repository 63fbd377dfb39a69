"""What a rank's state takes of the host's memory, beside a card."""

from __future__ import annotations

from torch import Tensor

from memfit.apply.state_streaming import large
from memfit.apply.train_state import TrainState
from memfit.torch_compat.attributes import local_tensor, storage_id_of


def host_bytes(train_state: TrainState) -> int:
    """Bytes of state that is on the host while a job trains on a card: a rank's parts of parameters and their
    gradients, optimizers' state, averages. 0 where the host is the device.

    Left out: what waits there for a moment, as batches that were read ahead and copies for a checkpoint do.
    """
    if train_state.device.type == "cpu":
        return 0
    engine, optimizers = train_state.engine, train_state.optimizers.values()
    stepped = [local_tensor(part) for optimizer in optimizers for part in engine.stepped(optimizer)]
    state = [tensor for optimizer in optimizers for own in optimizer.state.values() for _, tensor in large(own)]
    parts = [part for net in (*train_state.nets.values(), *train_state.ema.values()) for part in engine.parts(net)]
    held = [*stepped, *map(local_tensor, [*state, *parts])]
    storages = {storage_id_of(tensor): tensor.untyped_storage().nbytes() for tensor in held if _is_on_host(tensor)}
    gradients = sum({storage_id_of(part): part.nbytes for part in stepped if _is_on_host(part)}.values())
    return sum(storages.values()) + gradients


def _is_on_host(tensor: Tensor) -> bool:
    return tensor.device.type == "cpu"
