"""The training state on any engine, written and read by every rank together (torch.distributed.checkpoint).

Each rank writes what it holds and reads what it will hold: a state that 3 sharded ranks wrote is read by 2, by whole
replicas or by one device. Names are the nets' own, never a position: optimizers' states go by ``net.path``.

Left out: random numbers, which belong to a rank; what ``Job.saved`` adds to nets and optimizers.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint import StorageReader
from torch.distributed.checkpoint.planner import LoadPlanner
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    set_model_state_dict,
)

from memfit.apply.train_state import TrainState
from memfit.engine.collectives import is_memory_failure, reported
from memfit.engine.process_group import every_rank
from memfit.errors import InputError, describe
from memfit.job import is_trained
from memfit.train.checkpoint.legacy_parts import METADATA, LegacyLoadPlanner, LegacyReader, read_legacy_metadata
from memfit.train.checkpoint.parts_index import INDEX, read_index
from memfit.train.checkpoint.parts_storage import JsonLoadPlanner, JsonSavePlanner, PartsReader, PartsWriter
from memfit.train.checkpoint.tensor_file import TornError

_SAME_NAMES = StateDictOptions(strict=True)


def save_sharded(train_state: TrainState, folder: str | Path) -> None:
    """Writes the state; every rank calls it, on a folder that all of them see.

    Raises:
        InputError: the state holds a value that cannot be kept, naming it.
        OSError: a rank cannot write its part.
    """
    try:
        with _one_process_is_meant():
            storage: dict[str, Any] = {"storage_writer": PartsWriter(folder), "planner": JsonSavePlanner()}
            dcp.save(_written_here(train_state), **storage, **_group(train_state))
    except dcp.api.CheckpointException as error:
        raise _first_failure(error) from error


def load_sharded(train_state: TrainState, folder: str | Path) -> None:
    """Reads a state that any engine and any number of ranks wrote into a train state of the same job.

    Every rank calls it.

    Raises:
        InputError: it is the state of another job, or not whole.
    """
    state = _state(train_state)
    _read(train_state, state, folder)
    try:
        _put(train_state, state)
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        raise _unreadable(folder, describe(error)) from error


def _put(train_state: TrainState, state: dict[str, Any]) -> None:
    """A state that was read, put into nets, optimizers, averages, schedules and the scaler."""
    train_state.engine.load_state_of_parts(train_state.nets, train_state.optimizers, state)
    for name, net in train_state.ema.items():
        train_state.engine.load_net_of_parts(net, state["ema"][name])
    for name, schedule in train_state.schedules.items():
        schedule.load_state_dict(state["schedules"][name])
    if train_state.scaler:
        train_state.scaler.load_state_dict(state["scaler"])


def load_sharded_nets(train_state: TrainState, folder: str | Path) -> None:
    """The nets, buffers and averages alone of such a state, into a train state of one device.

    Raises:
        InputError: it is the state of another job, or not whole.
    """
    model = _trained(train_state)
    state = {"nets": get_model_state_dict(model), **_beside(train_state)}
    _read(train_state, state, folder)
    set_model_state_dict(model, state["nets"], options=_SAME_NAMES)
    for name, net in train_state.ema.items():
        set_model_state_dict(net, state["ema"][name], options=_SAME_NAMES)


def _read(train_state: TrainState, state: dict[str, Any], folder: str | Path) -> None:
    """Reads into the state; all ranks raise where one cannot.

    Raises:
        InputError: it is the state of another job, or not whole.
    """
    reader, planner, fault = None, None, None
    try:
        reader, planner = _reader(Path(folder))
    except TornError as error:
        fault = str(error)
    if (fault := reported(train_state.engine, fault)) is not None:
        raise _unreadable(folder, fault)
    try:
        with _one_process_is_meant():
            dcp.load(state, storage_reader=reader, planner=planner, **_group(train_state))
    except dcp.api.CheckpointException as error:
        failure = _first_failure(error)
        if is_memory_failure(failure):
            raise failure from error
        raise _unreadable(folder, describe(failure)) from error


def _reader(folder: Path) -> tuple[StorageReader, LoadPlanner]:
    """Of what memfit writes, or of what torch's own storage wrote before.

    Raises:
        TornError: what the folder holds cannot be read.
    """
    if not (folder / INDEX).exists() and (folder / METADATA).exists():
        return LegacyReader(folder, read_legacy_metadata(folder)), LegacyLoadPlanner()
    return PartsReader(folder, read_index(folder)), JsonLoadPlanner()


def _first_failure(error: dcp.api.CheckpointException) -> BaseException:
    """What the first rank raised; torch's own exception is none of Exception's, and its text is a traceback."""
    return error.failures[min(error.failures)][0]


def _unreadable(folder: str | Path, why: str) -> InputError:
    return InputError(
        f"checkpoint {folder}", f"it cannot be read into this job: {why}", "give a checkpoint of this job"
    )


def _trained(train_state: TrainState) -> nn.ModuleDict:
    return nn.ModuleDict({name: net for name, net in train_state.nets.items() if is_trained(net)})


def _state(train_state: TrainState) -> dict[str, Any]:
    """The state as tensors and parts of tensors; frozen nets have their buffers alone."""
    return {
        **train_state.engine.state_of_parts(train_state.nets, train_state.optimizers),
        **_beside(train_state),
        "schedules": {name: schedule.state_dict() for name, schedule in train_state.schedules.items()},
        "scaler": train_state.scaler.state_dict() if train_state.scaler else {},
    }


def _written_here(train_state: TrainState) -> dict[str, Any]:
    """What this rank writes: nets that each rank trains by itself are rank 0's, as under data parallelism."""
    state = _state(train_state)
    if train_state.engine.rank == 0:
        return state
    own = train_state.job.unsynchronised
    nets = {name: value for name, value in state["nets"].items() if name.split(".")[0] not in own}
    optimizers = {name: value for name, value in state["optimizers"].items() if train_state.shares((name,))}
    return {**state, "nets": nets, "optimizers": optimizers}


def _beside(train_state: TrainState) -> dict[str, Any]:
    return {
        "buffers": {name: dict(net.named_buffers()) for name, net in train_state.nets.items() if not is_trained(net)},
        "ema": {name: train_state.engine.net_of_parts(net) for name, net in train_state.ema.items()},
    }


def _group(train_state: TrainState) -> dict[str, Any]:
    group = None if train_state.engine.mesh is None else every_rank(train_state.engine.mesh)
    return {"process_group": group, "no_dist": group is None}


@contextmanager
def _one_process_is_meant() -> Iterator[None]:
    """Suppresses torch's warning that there is one process."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield
