"""The process group and mesh of a run's ranks."""

from __future__ import annotations

import logging
import os
import time
import uuid
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from memfit.device.hardware.loopback import is_loopback, loopback_environment
from memfit.engine.listen_address import is_one_node, open_store, store_host
from memfit.errors import InputError
from memfit.mesh import MeshShape
from memfit.torch_compat.gloo import give_gloo_one_worker

DATA = "data"
"""The dimension of a mesh of data-parallel ranks alone; others have the names of ``MeshShape``."""
TIMEOUT_SECONDS = 120.0
"""A collective that waits longer has lost a rank: the process ends, and torchrun starts all of them again."""

_STALE = timedelta(seconds=2)
"""How long a store's port may stay silent before it is asked for again."""


def join(turn: str = "") -> None:
    """Joins the default process group, once all ranks have: gloo for the host's tensors, NCCL for a card's.

    Args:
        turn: another one where all ranks join again without being started again.
    """
    if is_one_node() or is_loopback(os.environ.get("MASTER_ADDR", "")):
        os.environ.update(loopback_environment())
    give_gloo_one_worker()
    timeout = timedelta(seconds=float(os.environ.get("MEMFIT_COLLECTIVE_SECONDS", TIMEOUT_SECONDS)))
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    board, rank, world = next(dist.rendezvous("env://", timeout=timeout))
    key = f"memfit/{turn}"
    store = _fresh_store(board, key, rank, timeout)
    dist.init_process_group(backend, store=store, rank=rank, world_size=world, timeout=timeout)
    if rank == 0:
        board.delete_key(key)  # every rank has read it; those that are started again wait for the next one


def join_alone() -> None:
    """Joins a default process group of this process alone, for code of a job that asks for its rank."""
    os.environ.update(loopback_environment())
    give_gloo_one_worker()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)


def _fresh_store(board: dist.Store, key: str, rank: int, timeout: timedelta) -> dist.Store:
    """A store that rank 0 makes for this start alone; its address stands on torchrun's.

    torchrun's own outlives the processes (torch 2.13): started again, they would read addresses of those that are gone.
    Ranks that all ended before they had joined leave an address of such a store, which answers nobody.
    """
    until = time.monotonic() + timeout.total_seconds()
    if rank == 0:
        host, mark = store_host(), uuid.uuid4().hex
        store = open_store(host, timeout)
        store.set("start", mark)
        board.set(key, f"{host} {store.port} {mark}")
        return store
    while time.monotonic() < until:
        host, port, mark = board.get(key).decode().split()
        try:
            store = dist.TCPStore(host, int(port), is_master=False, timeout=_STALE, wait_for_workers=False)
            if store.get("start").decode() == mark:
                store.set_timeout(timeout)
                return store
        except RuntimeError:
            pass
        time.sleep(0.2)
    raise dist.DistStoreError(f"rank 0 opened no store within {timeout.total_seconds():g} s")


def data_mesh(device_type: str) -> DeviceMesh:
    """A mesh of every rank of the default group, all of them data-parallel."""
    return init_device_mesh(device_type, (dist.get_world_size(),), mesh_dim_names=(DATA,))


def mesh_of_ranks(device_type: str, shape: MeshShape) -> DeviceMesh:
    """A mesh of every rank of the default group in several dimensions.

    torch warns of every tensor that it gathers over one dimension after the other, which no choice of ours avoids.

    Raises:
        InputError: the group has another number of ranks.
    """
    world = dist.get_world_size()
    if world != shape.world:
        raise InputError(f"--mesh {shape}", f"{world} ranks were started", f"start {shape.world} ranks")
    sizes = shape.sizes()
    logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
    return init_device_mesh(device_type, tuple(sizes.values()), mesh_dim_names=tuple(sizes))


def every_rank(mesh: DeviceMesh) -> dist.ProcessGroup:
    """The group of all ranks of a mesh: those of the default group, or of one dimension of a mesh of them."""
    if DATA in (mesh.mesh_dim_names or ()):
        return mesh.get_group(DATA)
    if mesh.ndim == 1 and mesh.size() < dist.get_world_size():
        return mesh.get_group()
    assert dist.group.WORLD is not None
    return dist.group.WORLD
