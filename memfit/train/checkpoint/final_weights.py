"""The final weights: one safetensors file for each trained net, of the average where there is one."""

from __future__ import annotations

from pathlib import Path

from memfit.apply.train_state import TrainState
from memfit.atomic_file import open_atomic
from memfit.job import is_trained
from memfit.train.checkpoint.state_codec import encode
from memfit.train.checkpoint.tensor_file import stream_tensors
from memfit.train.run_folder import writing


def write_final(train_state: TrainState, folder: Path) -> None:
    """Writes ``NET.safetensors`` of each trained net on rank 0, whole or not at all. Tied tensors are written once.

    Every rank calls it where the engine shards its state.

    Raises:
        CannotWriteError: a file cannot be written.
    """
    if train_state.engine.rank == 0:
        with writing(folder):
            folder.mkdir(exist_ok=True)
    for name, net in train_state.nets.items():
        if is_trained(net):
            path = folder / f"{name}.safetensors"
            values = train_state.engine.weights(train_state.ema.get(name, net))
            if train_state.engine.rank > 0:
                continue
            _, tensors = encode(values, f"net {name!r}")
            with writing(path), open_atomic(path) as file:
                stream_tensors(file, tensors, {"format": "pt"})
