"""The training state under ZeRO, as torch.distributed.checkpoint writes and reads it: parts of named tensors.

A rank holds a run of a parameter's elements (``memfit.engine.zero_partition``), which is a few boxes of the whole
tensor.
Names, shapes and nesting are those that torch gives whole and FSDP2's states, so that any engine reads what any wrote.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.optim import Optimizer

from memfit.apply.train_state import TrainState, is_trained
from memfit.engine.zero import Zero
from memfit.engine.zero_full_state import named, runs_of, weights_changed
from memfit.engine.zero_partition import Run, boxes


class Piece(Tensor):
    """A whole tensor of which a run of elements is here, as torch.distributed.checkpoint asks for it.

    It has the shape of the whole and no other use: operators on it raise (torch's own interface, ``_Checkpointable``,
    takes tensors alone).
    """

    held: Tensor
    """The run; written to when it is read."""
    start: int

    @staticmethod
    def __new__(cls, values: Tensor, start: int, shape: tuple[int, ...]) -> Piece:
        piece = Tensor._make_wrapper_subclass(cls, shape, dtype=values.dtype, device=values.device)
        piece.held, piece.start = values, start
        return piece

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any, kwargs: Any) -> Any:  # type: ignore[override]
        raise TypeError(f"{func} on a tensor of which a part is here")

    def _chunks(self) -> Iterator[tuple[ChunkStorageMetadata, Tensor]]:
        at = 0
        for offsets, sizes in boxes(tuple(self.shape), self.start, self.start + self.held.numel()):
            box = torch.Size(sizes)
            yield (
                ChunkStorageMetadata(offsets=torch.Size(offsets), sizes=box),
                self.held[at : at + box.numel()].view(box),
            )
            at += box.numel()

    def __create_write_items__(self, fqn: str, piece: object) -> list[WriteItem]:
        return [
            WriteItem(
                index=MetadataIndex(fqn, chunk.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(
                    chunk=chunk,
                    properties=TensorProperties.create_from_tensor(self.held),
                    size=self.shape,
                ),
            )
            for chunk, _ in self._chunks()
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [chunk for chunk, _ in self._chunks()]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        return next(box for chunk, box in self._chunks() if chunk.offsets == index.offset)


def zero_state(train_state: TrainState, engine: Zero) -> dict[str, Any]:
    """Nets and optimizers, as ``memfit.train.checkpoint.sharded_checkpoint`` nests them; their tensors are the train
    state's own.

    Every parameter's optimizer state is there, made where there was none.
    """
    ((name, optimizer),) = train_state.optimizers.items()
    own = runs_of(engine)
    _make_state(optimizer, own)
    return {"nets": _nets(train_state, engine), "optimizers": {name: _optimizer_state(optimizer, own, engine)}}


def take_zero_state(train_state: TrainState, engine: Zero, state: dict[str, Any]) -> None:
    """Takes over what was read into the tensors of ``zero_state``: numbers, and what DeepSpeed holds twice."""
    ((name, optimizer),) = train_state.optimizers.items()
    given = state["optimizers"][name]
    for run in runs_of(engine):
        for key, value in given["state"].get(run.name, {}).items():
            if not isinstance(value, Tensor):
                optimizer.state[run.flat][key] = value
    for group, read in zip(optimizer.param_groups, given["param_groups"], strict=True):
        group.update({key: value for key, value in read.items() if key != "params"})
    weights_changed(engine)


def zero_net(net: nn.Module, engine: Zero) -> dict[str, Tensor]:
    """A net's state_dict, or its average's: each tensor whole, or this rank's piece of it; they are the net's own."""
    return {path: _weight(value, engine) for path, value in net.state_dict(keep_vars=True).items()}


def _nets(train_state: TrainState, engine: Zero) -> dict[str, Any]:
    return {
        f"{name}.{path}": value
        for name, net in train_state.nets.items()
        if is_trained(net)
        for path, value in zero_net(net, engine).items()
    }


def _weight(value: Any, engine: Zero) -> Tensor | Piece:
    """A tensor that every rank has whole, or this rank's piece of it (stage 3)."""
    if not hasattr(value, "ds_tensor"):
        held: Tensor = value.detach()
        return held
    part = value.ds_tensor.data
    start = min(engine.rank * part.numel(), value.ds_numel)
    return Piece(part[: value.ds_numel - start], start, tuple(value.ds_shape))


def _optimizer_state(optimizer: Optimizer, own: list[Run], engine: Zero) -> dict[str, Any]:
    state = {run.name: {key: _value(value, run) for key, value in optimizer.state[run.flat].items()} for run in own}
    made = list(zip(named(engine), engine.divided.groups, strict=True))
    groups = [
        {**{k: v for k, v in group.items() if k != "params"}, "params": [name for name, own in made if own == number]}
        for number, group in enumerate(optimizer.param_groups)
    ]
    return {"state": state, "param_groups": groups}


def _value(value: Any, run: Run) -> Any:
    """Of one parameter: a piece of what is as large as the flat part, and numbers as they are."""
    if isinstance(value, Tensor) and value.numel() == run.flat.numel() and value.dim():
        return Piece(run.of(value), run.start, run.shape)
    return value


def _make_state(optimizer: Optimizer, own: list[Run]) -> None:
    """A step that changes no weight makes an optimizer's state, as torch makes it (``_init_optim_state``)."""
    fresh = {id(run.flat): run for run in own if not optimizer.state.get(run.flat)}
    if not fresh:
        return
    kept = [(group["params"], group["lr"]) for group in optimizer.param_groups]
    gradients = [(run.flat, run.flat.grad) for run in fresh.values()]
    for number, group in enumerate(optimizer.param_groups):
        group["params"] = [run.flat for run in fresh.values() if run.group == number]
        group["lr"] = torch.tensor(0.0) if isinstance(group["lr"], Tensor) else 0.0
    for flat, _ in gradients:
        flat.grad = torch.zeros_like(flat)
    step: Callable[[], Any] = optimizer.step
    step()
    for flat, gradient in gradients:
        flat.grad = gradient
    for group, (parameters, rate) in zip(optimizer.param_groups, kept, strict=True):
        group["params"], group["lr"] = parameters, rate
