"""Nodes that share no file system: the first node's folder holds the run, and others have a copy of what they need.

When ranks start, the first rank sends the newest checkpoint, the state of a stream and what was made smaller to the
nodes that lack them. A checkpoint of sharded ranks is written in parts on every node, and the parts are sent to the
first one, which puts it in its place: a node that is lost, with its disk, can be replaced by an empty one. The bytes go
through the ranks' process group (gloo), in pieces.
"""

from __future__ import annotations

import contextlib
import os
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import reduce
from pathlib import Path
from typing import IO, Any

import torch
import torch.distributed as dist

from memfit.engine.collectives import gather, reported
from memfit.engine.process_group import every_rank
from memfit.engine.protocol import Engine
from memfit.engine.torchrun_env import torchrun_env
from memfit.errors import InputError, describe
from memfit.plan import Plan
from memfit.train.checkpoint.checkpoints import MANIFEST, Checkpoints
from memfit.train.data.stream_file import NAME as STREAM
from memfit.train.recovery.reduced_limits import ReducedLimits, read_reduced_limits, set_reduced_limits
from memfit.train.run_folder import CannotWriteError, RunFolder

SEPARATE = "MEMFIT_SEPARATE_FOLDER"
"""Environment variable that a node sets for its ranks where its folder is not the first node's."""
PIECE = 8 << 20
"""Bytes that are sent at once."""


@dataclass(frozen=True, kw_only=True)
class NodeFolders:
    """The ranks whose node has a folder of its own."""

    separate: tuple[int, ...] = ()
    writers: tuple[int, ...] = ()
    """The first rank of each such node, which writes for it."""


SHARED = NodeFolders()
"""All nodes share the folder, or there is one node."""


def node_folders(engine: Engine) -> NodeFolders:
    """Which nodes have a folder of their own. Every rank calls it."""
    if engine.world == 1:
        return SHARED
    place = torchrun_env()
    own = (SEPARATE in os.environ, place is not None and place.local_rank == 0)
    ranks = list(enumerate(gather(engine, own)))
    return NodeFolders(
        separate=tuple(rank for rank, (separate, _) in ranks if separate),
        writers=tuple(rank for rank, (separate, first) in ranks if separate and first),
    )


def send_run(engine: Engine, folders: NodeFolders, folder: RunFolder, plan: Plan) -> None:
    """Gives every node what ranks read when they start, where a run goes on. Every rank calls it.

    Raises:
        CannotWriteError: a node cannot write its copy. All ranks raise.
    """
    _share_limits(engine, folders, folder, plan)
    checkpoints, source = Checkpoints(folder.checkpoints), None
    if engine.rank == 0:
        with contextlib.suppress(InputError):  # none is whole: ``resume`` says so, on every rank
            newest = checkpoints.newest(lambda line: None)
            source = None if newest is None else newest.path
    files = gather(engine, _files_of(folder, source) if engine.rank == 0 else None)[0] or {}
    number = next((int(Path(name).parts[1]) for name in files if name.startswith("checkpoints/")), None)
    writes = engine.rank in folders.writers
    lacks = writes and any(_sum_of(folder.path / name) != checksum for name, (_, checksum) in files.items())
    fault = None
    if any(gather(engine, lacks)):
        with contextlib.ExitStack() as stack:
            try:
                place = stack.enter_context(checkpoints.received(number)) if lacks and number is not None else None
            except OSError as error:
                place, fault = None, describe(error)
            for name, (nbytes, _) in files.items():
                target = _target(folder, place, name) if lacks else None
                fault = _send_to_all(engine, folder.path / name, target, nbytes) or fault
    if writes and number is not None:
        checkpoints.clean(number)
    if (fault := reported(engine, fault)) is not None:
        raise CannotWriteError(f"the copy of a checkpoint cannot be written on its node: {fault}; make room there")


def _share_limits(engine: Engine, folders: NodeFolders, folder: RunFolder, plan: Plan) -> None:
    """Every node reads what any of them has made smaller."""
    own = read_reduced_limits(folder, plan)
    known = [limits for limits in gather(engine, own) if limits is not None]
    merged = reduce(ReducedLimits.and_also, dict.fromkeys(known))
    if merged != own and (engine.rank == 0 or engine.rank in folders.writers):
        set_reduced_limits(folder, plan, merged)
    gather(engine, None)


def _files_of(folder: RunFolder, checkpoint: Path | None) -> dict[str, tuple[int, int]]:
    """Bytes and checksum of each file to send, by its name in the folder; the manifest last."""
    files = [path for path in (checkpoint.rglob("*") if checkpoint is not None else ()) if path.is_file()]
    files.sort(key=lambda path: (path.name == MANIFEST, path))
    files += [path for path in (folder.path / STREAM,) if path.is_file()]
    return {str(path.relative_to(folder.path)): (path.stat().st_size, _sum_of(path) or 0) for path in files}


def _sum_of(path: Path) -> int | None:
    """A file's checksum; None where it cannot be read."""
    total = 0
    try:
        with open(path, "rb") as file:
            while piece := file.read(PIECE):
                total = zlib.crc32(piece, total)
    except OSError:
        return None
    return total


def _target(folder: RunFolder, place: Path | None, name: str) -> Path | None:
    if name == STREAM:
        return folder.path / name
    return None if place is None else place.joinpath(*Path(name).parts[2:])


def _send_to_all(engine: Engine, source: Path, target: Path | None, nbytes: int) -> str | None:
    """Broadcasts a file of rank 0; those with a target write it. Gives what failed here, after all pieces were sent."""
    assert engine.mesh is not None
    group, fault = every_rank(engine.mesh), None
    with _opened(source if engine.rank == 0 else target, reads=engine.rank == 0) as (file, failed):
        fault = failed
        for start in range(0, nbytes, PIECE):
            piece = torch.empty(min(PIECE, nbytes - start), dtype=torch.uint8)
            if engine.rank == 0:
                fault = _read_into(file, piece) or fault
            dist.broadcast(piece, src=0, group=group)
            if engine.rank > 0:
                fault = _write_from(file, piece) or fault
    return fault


def collect_parts(engine: Engine, folders: NodeFolders, parts: Path) -> str | None:
    """Sends the parts that ranks of other nodes have written to the first node. Every rank calls it; gives what failed
    here."""
    if not folders.separate:
        return None
    assert engine.mesh is not None
    group, fault = every_rank(engine.mesh), None
    own = parts / _part_name(engine.rank)
    sizes = gather(engine, own.stat().st_size if engine.rank in folders.separate and own.exists() else 0)
    for rank in folders.separate:
        if engine.rank not in (0, rank) or not sizes[rank]:
            continue
        path = parts / _part_name(rank)
        with _opened(path, reads=engine.rank == rank) as (file, failed):
            fault = failed or fault
            for start in range(0, sizes[rank], PIECE):
                piece = torch.empty(min(PIECE, sizes[rank] - start), dtype=torch.uint8)
                if engine.rank == rank:
                    fault = _read_into(file, piece) or fault
                    dist.send(piece, dst=0, group=group)
                else:
                    dist.recv(piece, src=rank, group=group)
                    fault = _write_from(file, piece) or fault
    return fault


def _part_name(rank: int) -> str:
    return f"rank-{rank:05d}.safetensors"


@contextlib.contextmanager
def _opened(path: Path | None, *, reads: bool) -> Iterator[tuple[IO[bytes] | None, str | None]]:
    """(the open file, None), or (None, why it cannot be opened); without a path, (None, None)."""
    if path is None:
        yield None, None
        return
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file: Any = open(path, "rb" if reads else "wb")  # noqa: SIM115
    except OSError as error:
        yield None, describe(error)
        return
    try:
        yield file, None
    finally:
        with contextlib.suppress(OSError):
            file.close()


def _read_into(file: IO[bytes] | None, piece: torch.Tensor) -> str | None:
    """Fills a piece; zeros where the file ends or cannot be read, which is then said."""
    content = b""
    with contextlib.suppress(OSError):
        content = file.read(len(piece)) if file is not None else b""
    piece.zero_()
    piece[: len(content)] = torch.frombuffer(bytearray(content), dtype=torch.uint8) if content else 0
    return None if len(content) == len(piece) else "a file of the checkpoint cannot be read"


def _write_from(file: IO[bytes] | None, piece: torch.Tensor) -> str | None:
    """Writes a piece; what fails is said, and the pieces after it still come."""
    if file is None:
        return None
    try:
        file.write(piece.numpy().tobytes())
    except OSError as error:
        return describe(error)
    return None
