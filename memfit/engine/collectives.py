"""What ranks tell each other beside gradients: small values, failures, sums of losses.

On a fake process group every rank is taken to be like this one; without a mesh there is this one alone.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor

from memfit.engine.process_group import every_rank
from memfit.errors import describe, message_of
from memfit.no_memory import says_no_memory

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from memfit.engine.protocol import Engine

NOTHING = nullcontext()
"""A context that does nothing, made once."""
Value = TypeVar("Value")
Units = int | float | Tensor


class Ranks(Protocol):
    """What knows the ranks that share a window: every engine."""

    @property
    def world(self) -> int:
        """How many they are."""

    @property
    def data_world(self) -> int:
        """Shares of the window; neighbouring ranks have the same where there are fewer than ranks."""

    @property
    def context_ranks(self) -> int:
        """Ranks of a share that each compute the losses of a part of its sequences; 1: one computes them all."""

    @property
    def stages(self) -> int:
        """Stages of a pipeline, each on as many ranks; 1: every rank computes losses."""

    @property
    def mesh(self) -> DeviceMesh | None:
        """Their mesh; None on one rank."""


class RanksOutOfMemoryError(RuntimeError):
    """Memory ran out on some rank. Every rank raises it, at the same place, none of them inside a collective."""

    def __init__(self, reports: Mapping[int, str]) -> None:
        self.ranks = tuple(reports)
        super().__init__("; ".join(f"rank {rank}: {report}" for rank, report in reports.items()))


def is_memory_failure(error: BaseException) -> bool:
    """Whether an exception says that memory ran out: Python's, the CPU allocator's, CUDA's, or another rank's."""
    if isinstance(error, torch.OutOfMemoryError | RanksOutOfMemoryError) or says_no_memory(error):
        return True
    if not isinstance(error, RuntimeError):
        return False
    message = message_of(error)
    if message == _ONEDNN_FAILED or any(words in message for words in _OUT_OF_MEMORY):
        return True
    return len(message) in _STREAM_SIZES and _CPU_ALLOCATOR.fullmatch(message) is not None


_ONEDNN_FAILED = "could not create a primitive"
"""The whole message where oneDNN has no memory for a kernel; of what it does not support it says more."""
_STREAM_SIZES = (15, 30, 60)
"""Characters after which libstdc++'s stream of a text takes more memory. Where there is none, the text ends there."""
_CPU_ALLOCATOR = re.compile(r"\[enforce fail a(t alloc_cpu\.cpp(:\d+\] err == 0\. DefaultCPUAl\w*)?)?")
"""The beginnings of the CPU allocator's message that are so long."""
_OUT_OF_MEMORY = (
    "can't allocate memory",
    "could not create a memory",
    "std::bad_alloc",
    "CUDA out of memory",
    "CUDA error: out of memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_ALLOC_FAILED",
    "Cannot allocate memory",
)
"""How torch and its libraries say it in a plain RuntimeError."""


def gather(engine: Ranks, value: Value) -> list[Value]:
    """Every rank's value, in the order of ranks. Values are plain Python: numbers, texts, lists, dicts."""
    if engine.mesh is None or is_fake(engine):
        return [value] * engine.world
    values: list[Any] = [None] * engine.world
    dist.all_gather_object(values, value, group=every_rank(engine.mesh))
    return values


def gather_shares(engine: Ranks, value: Value) -> list[Value]:
    """As ``gather``, one value for each share of the window: of ``share_ranks``."""
    values = gather(engine, value)
    return [values[rank] for rank in share_ranks(engine)]


def share_ranks(engine: Ranks) -> range:
    """The rank that speaks for each share of the window: the first of those that hold parts of a layer, and of the
    stages of a pipeline the last, which computes the losses."""
    of_stage = engine.world // engine.stages
    return range(engine.world - of_stage, engine.world, of_stage // engine.data_world)


def gather_parts(engine: Ranks, value: Value) -> list[list[Value]]:
    """As ``gather_shares``, for each share the values of all ranks that hold a part of its sequences."""
    values, parts = gather(engine, value), engine.context_ranks
    own = [values[rank] for rank in loss_ranks(engine)]
    return [own[begin : begin + parts] for begin in range(0, len(own), parts)]


def loss_ranks(engine: Ranks) -> range:
    """The ranks whose losses, added up, are those of all shares: of ``share_ranks``, each with those that hold the
    other parts of its sequences."""
    of_stage = engine.world // engine.stages
    return range(engine.world - of_stage, engine.world, of_stage // (engine.data_world * engine.context_ranks))


def reported(engine: Engine, report: str | None) -> str | None:
    """The report of the first rank that has one; None where no rank has. Every rank calls it at the same place."""
    return next((text for text in gather(engine, report) if text is not None), None)


def agree(engine: Engine, failed: bool) -> bool:
    """Whether any rank failed. Every rank calls it at the same place."""
    if engine.mesh is None or is_fake(engine):
        return failed
    flag = torch.tensor(float(failed))
    dist.all_reduce(flag, op=dist.ReduceOp.MAX, group=every_rank(engine.mesh))
    return bool(flag)


def together(engine: Engine) -> AbstractContextManager[None]:
    """A part of the window that every rank ends well, or after which every rank raises RanksOutOfMemoryError.

    The failure itself passes through on one rank, and on an engine in lockstep: the others may then wait in a
    collective inside of this part, and cannot be asked.
    """
    return NOTHING if engine.world == 1 or engine.syncs_in_backward else _together(engine)


@contextmanager
def _together(engine: Engine) -> Iterator[None]:
    report = None
    try:
        yield
    except Exception as error:
        if not is_memory_failure(error):
            raise
        report = describe(error)
    if agree(engine, report is not None):
        reports = enumerate(gather(engine, report))
        raise RanksOutOfMemoryError({rank: text for rank, text in reports if text is not None})


def total(
    engine: Engine, sums: Mapping[str, Tensor], units: Mapping[str, Units]
) -> tuple[dict[str, Tensor], dict[str, Units]]:
    """Sums of losses and their units over all ranks, in float64; a rank without a micro-batch has none."""
    if engine.world == 1:
        return dict(sums), dict(units)
    if engine.mesh is None or is_fake(engine):
        parts = len(loss_ranks(engine))
        return {n: v * parts for n, v in sums.items()}, {n: u * parts for n, u in units.items()}
    shares = gather_parts(engine, {name: (float(value), float(units[name])) for name, value in sums.items()})
    ranks = [rank for share in shares for rank in share]
    all_sums: dict[str, Tensor] = {}
    all_units: dict[str, Units] = {}
    for name in {name: None for rank in ranks for name in rank}:
        pairs = [rank[name] for rank in ranks if name in rank]
        all_sums[name] = torch.tensor(math.fsum(value for value, _ in pairs), dtype=torch.float64)
        all_units[name] = math.fsum(count for _, count in pairs)
    return all_sums, all_units


def full_tensor(tensor: Tensor) -> Tensor:
    """A tensor that an engine has sharded, gathered from its ranks, which all call it; another is itself."""
    tensor = tensor.detach()
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def local_shard(tensor: Tensor, like: Tensor) -> Tensor:
    """This rank's part of a whole tensor that every rank has, where ``like`` is sharded; else the tensor itself."""
    if not isinstance(like, DTensor):
        return tensor
    from memfit.torch_compat.distributed import OWN_VALUES

    return distribute_tensor(tensor, like.device_mesh, like.placements, **OWN_VALUES)


def is_fake(engine: Ranks) -> bool:
    """Whether the other ranks are simulated: all are taken to be like this one."""
    assert engine.mesh is not None
    return dist.get_backend(every_rank(engine.mesh)) == "fake"
