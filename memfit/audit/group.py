"""A process as one rank of a world would see it, without the other processes.

torch.distributed gets torch's fake process group, so that code which asks for its rank and world size runs. Broadcasts
and gathers are recorded rank by rank and replayed: a seed that rank 0 broadcasts reaches the others. Where a rank needs
what a later one sends (all_gather, all_reduce), the world is run a second time with the first run's records.
"""

from __future__ import annotations

import contextlib
import copy
import io
import os
import random
import sys
from collections.abc import Iterator
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from memfit.errors import LIBRARY_FOLDERS

TORCH_SEED = torch.random.default_generator.initial_seed()
"""The seed that every process starts with unless it is set: torch's own, the same on all ranks."""


class Exchange:
    """What the ranks of one world send each other: call k of a rank meets call k of the others."""

    def __init__(self, world: int) -> None:
        self.world = world
        self.sent: dict[int, list[Any]] = {}
        self.known: dict[int, list[Any]] = {}
        self.incomplete = False
        self.rank, self.call = 0, 0

    def begin(self, rank: int) -> None:
        """The calls that follow are this rank's."""
        self.rank, self.call, self.sent[rank] = rank, 0, []

    def again(self) -> None:
        """Keeps what was sent for a second run, in which nothing is missing."""
        self.known, self.sent, self.incomplete = self.sent, {}, False

    def swap(self, value: Any) -> list[Any]:
        """Sends a value and takes what every rank sends in the same call; its own value for ranks not heard yet."""
        self.sent[self.rank].append(copy.deepcopy(value))
        values = []
        for rank in range(self.world):
            heard = self.sent if rank in self.sent and len(self.sent[rank]) > self.call else self.known
            if rank in heard and len(heard[rank]) > self.call:
                values.append(copy.deepcopy(heard[rank][self.call]))
            else:
                self.incomplete = True
                values.append(copy.deepcopy(value))
        self.call += 1
        return values


class CardQuestions:
    """Whether the code of a target asks for a CUDA card, and what it is told.

    Args:
        says_yes: the target is told that its rank has a card; libraries hear what is so.
    """

    def __init__(self, *, says_yes: bool) -> None:
        self.asked = False
        self._says_yes = says_yes
        self._available = torch.cuda.is_available

    @contextlib.contextmanager
    def answered(self, rank: int, world: int) -> Iterator[None]:
        """While it holds, the target's questions are noted and answered."""
        with contextlib.ExitStack() as stack:
            stack.enter_context(mock.patch.object(torch.cuda, "is_available", self._answer))
            if self._says_yes:
                stack.enter_context(mock.patch.object(torch.cuda, "set_device", return_value=None))
                stack.enter_context(mock.patch.object(torch.cuda, "current_device", return_value=rank))
                stack.enter_context(mock.patch.object(torch.cuda, "device_count", return_value=world))
            yield

    def _answer(self) -> bool:
        if sys._getframe(1).f_code.co_filename.startswith(LIBRARY_FOLDERS):
            return self._available()
        self.asked = True
        return self._says_yes or self._available()


@contextlib.contextmanager
def as_rank(rank: int, world: int, exchange: Exchange) -> Iterator[None]:
    """Environment, random states, process group and collectives of a rank in a fresh process."""
    environment = {
        "RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(world),
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500", "ACCELERATE_USE_CPU": "true",
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
    }  # fmt: skip
    states = random.getstate(), np.random.get_state(), torch.random.get_rng_state()
    exchange.begin(rank)
    with mock.patch.dict(os.environ, environment), contextlib.ExitStack() as stack:
        for name, replaced in _collectives(rank, world, exchange).items():
            for module in (dist, dist.distributed_c10d):
                if hasattr(module, name):
                    stack.enter_context(mock.patch.object(module, name, replaced))
        stack.enter_context(mock.patch.object(DistributedDataParallel, "__init__", _ddp_alone))
        random.seed(f"rank {rank}")
        np.random.seed(1000 + rank)
        torch.manual_seed(TORCH_SEED)
        _forget_accelerate()
        started = _start_group(rank, world)
        try:
            yield
        finally:
            if started and dist.is_initialized():
                dist.destroy_process_group()
            _forget_accelerate()
            random.setstate(states[0])
            np.random.set_state(states[1])
            torch.random.set_rng_state(states[2])


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """A context in which what targets print goes to standard error: standard output is the audit's own."""
    with contextlib.redirect_stdout(sys.stderr or io.StringIO()):
        yield


_ddp_init = DistributedDataParallel.__init__


def _ddp_alone(ddp: Any, *args: Any, **options: Any) -> None:
    """DDP whose gradients stay as they are: the fake group's own all-reduce gives its reducer nothing."""
    _ddp_init(ddp, *args, **options)
    ddp.register_comm_hook(None, lambda state, bucket: _as_future(bucket.buffer()))


def _as_future(value: Any) -> Any:
    done: Any = torch.futures.Future()
    done.set_result(value)
    return done


_init_process_group = dist.init_process_group


def _start_group(rank: int, world: int) -> bool:
    if not dist.is_available() or dist.is_initialized():
        return False
    from memfit.torch_compat.distributed import FakeStore

    _init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)
    return True


def _forget_accelerate() -> None:
    """Accelerate keeps rank and world in a class for the life of a process."""
    state = sys.modules.get("accelerate.state")
    if state is not None:
        state.AcceleratorState._reset_state(True)
        state.GradientState._reset_state()


class _Done:
    def wait(self, *args: Any) -> bool:
        return True

    def is_completed(self) -> bool:
        return True


def _collectives(rank: int, world: int, exchange: Exchange) -> dict[str, Any]:
    def broadcast(
        tensor: Any, src: int | None = None, *args: Any, group_src: int | None = None, **options: Any
    ) -> _Done:
        tensor.copy_(exchange.swap(tensor)[src if src is not None else group_src or 0].reshape(tensor.shape))
        return _Done()

    def broadcast_object_list(
        objects: list[Any], src: int | None = None, *args: Any, group_src: int | None = None, **options: Any
    ) -> None:
        objects[:] = exchange.swap(list(objects))[src if src is not None else group_src or 0]

    def all_gather(tensors: list[Any], tensor: Any, *args: Any, **options: Any) -> _Done:
        for into, value in zip(tensors, exchange.swap(tensor), strict=True):
            into.copy_(value)
        return _Done()

    def all_gather_into_tensor(output: Any, tensor: Any, *args: Any, **options: Any) -> _Done:
        output.copy_(torch.cat([value.reshape(-1) for value in exchange.swap(tensor)]).reshape(output.shape))
        return _Done()

    def all_gather_object(objects: list[Any], value: Any, *args: Any, **options: Any) -> None:
        objects[:] = exchange.swap(value)

    def all_reduce(tensor: Any, op: Any = dist.ReduceOp.SUM, *args: Any, **options: Any) -> _Done:
        values = torch.stack(exchange.swap(tensor))
        if op == dist.ReduceOp.MAX:
            tensor.copy_(values.amax(0))
        elif op == dist.ReduceOp.MIN:
            tensor.copy_(values.amin(0))
        else:
            total = values.sum(0)
            tensor.copy_(total / world if op == dist.ReduceOp.AVG else total)
        return _Done()

    def nothing(*args: Any, **options: Any) -> _Done:
        return _Done()

    def same_group(*args: Any, **options: Any) -> Any:
        return dist.group.WORLD

    return {
        "init_process_group": nothing, "barrier": nothing, "monitored_barrier": nothing, "new_group": same_group,
        "broadcast": broadcast, "broadcast_object_list": broadcast_object_list, "all_gather": all_gather,
        "all_gather_into_tensor": all_gather_into_tensor, "all_gather_object": all_gather_object,
        "all_reduce": all_reduce,
    }  # fmt: skip
