"""The final weights: one safetensors file for each trained net, of the average where there is one."""

from __future__ import annotations

import os
from pathlib import Path

from memfit.apply.train_state import TrainState, is_trained
from memfit.train.checkpoint.state_codec import encode
from memfit.train.checkpoint.tensor_file import write_tensors
from memfit.train.run_folder import writing


def write_final(train_state: TrainState, folder: Path) -> None:
    """Writes ``NET.safetensors`` beside its place, syncs it and renames it there, on rank 0. Tied tensors come once.

    Of an engine that spreads its state, every rank calls it.

    Raises:
        CannotWriteError: a file cannot be written.
    """
    with writing(folder):
        folder.mkdir(exist_ok=True)
    for name, net in train_state.nets.items():
        if is_trained(net):
            path = folder / f"{name}.safetensors"
            beside = folder / f".{path.name}.{os.getpid()}"
            values = train_state.engine.weights(train_state.ema.get(name, net))
            if train_state.engine.rank > 0:
                continue
            _, tensors = encode(values, f"net {name!r}")
            try:
                with writing(path):
                    write_tensors(beside, tensors, {"format": "pt"})
                    beside.replace(path)
            finally:
                beside.unlink(missing_ok=True)
