"""One rank of many, on a fake process group (no real collective runs here).

Six blocks of 32.02 MiB. What a rank holds follows from FSDP2's and DDP's rules: parameters / world after wrapping;
three gathered blocks at the peak of a forward, of which one is the last window's (torch 2.15 lets go of that one after
the backward); gradients and a reduced block on top in backward.
"""

import contextlib
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from memfit.device.hardware.catalogue import find_device
from memfit.device.virtual.backend import NAME
from memfit.device.virtual.card_rules import CardRules
from memfit.device.virtual.fake_group import fake_world, wrapped_by_ddp
from memfit.device.virtual.virtual_device import virtual_gpu
from memfit.installation import release_number
from memfit.job import Shape
from memfit.planner.predict import predict
from memfit.torch_compat import TorchDispatchMode
from memfit.torch_compat.distributed import CHUNKS, Chunks, fsdp_param
from testing.nets import JOBS
from tests.device import minimal_tracer
from tests.device.minimal_tracer import MinimalTracer

RELEASE = release_number(torch.__version__)
BLOCK = 4 * (1024 * 4096 + 4096 + 4096 * 1024 + 1024)
PARAMETERS = 6 * BLOCK


def blocks():
    return nn.Sequential(*(nn.Sequential(nn.Linear(1024, 4096), nn.GELU(), nn.Linear(4096, 1024)) for _ in range(6)))


def sharded(world, **options):
    net = blocks()
    mesh = init_device_mesh(NAME, (world,))
    for part in (*net, net):
        fully_shard(part, mesh=mesh, **options)
    return net


def window(world, wrap, quiet=True, windows=2):
    """Live bytes after wrapping, at the last window's start, and its peaks: forward, backward, optimizer."""
    with virtual_gpu(CardRules()) as gpu:
        tracer = MinimalTracer(gpu)

        @contextlib.contextmanager
        def muted():
            before, tracer.muted = tracer.muted, True
            yield
            tracer.muted = before

        with fake_world(world, quiet=muted if quiet else contextlib.nullcontext), tracer:
            with torch.device(gpu.device):
                net = wrap()
            live = tracer.live
            optimizer = torch.optim.AdamW(net.parameters())
            for _ in range(windows):
                peaks = [live]
                x = torch.randn(16, 1024, device="cuda")
                peaks.append(tracer.live)
                tracer.peak = 0
                loss = net(x).sum()
                peaks.append(tracer.peak)
                tracer.peak = 0
                loss.backward()
                peaks.append(tracer.peak)
                tracer.peak = 0
                optimizer.step()
                peaks.append(tracer.peak)
                optimizer.zero_grad()
            return peaks


def mib(nbytes):
    return [round(value / 2**20, 1) for value in nbytes]


@pytest.mark.parametrize(
    ("world", "expected"),
    [
        (2, [96.1, 288.2, 387.1 if RELEASE < (2, 15) else 355.7, 481.2, 480.4]),
        (8, [24.0, 72.1, 171.0 if RELEASE < (2, 15) else 139.5, 217.1, 120.1]),
    ],
)
def test_fsdp2(no_gc, world, expected):
    peaks = window(world, lambda: sharded(world))
    assert peaks[0] == PARAMETERS // world
    assert mib(peaks) == expected


def test_fsdp2_in_bf16(no_gc):
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    peaks = window(8, lambda: sharded(8, mp_policy=policy))
    assert peaks[0] == PARAMETERS // 8
    # torch 2.12 lets go of a module's reduced gradients only after it has made the next one's (its loop variable).
    assert mib(peaks)[2:4] == [121.6 if RELEASE < (2, 15) else 107.6, 184.5 if RELEASE == (2, 12) else 168.6]


@pytest.mark.filterwarnings("ignore:.*Time stats:UserWarning")
def test_ddp_has_buckets_of_all_gradients(no_gc):
    """Parameters, buckets, two states of AdamW; then gradients apart from the buckets, or views of them."""
    apart = window(8, lambda: wrapped_by_ddp(blocks()))
    assert apart[0] == 2 * PARAMETERS
    assert mib(apart)[1:3] == [768.5, 771.9]
    assert mib(apart)[4] == 1152.8
    views = window(8, lambda: wrapped_by_ddp(blocks(), gradient_as_bucket_view=True))
    assert views[0] == 2 * PARAMETERS
    assert mib(views)[4] == 960.6


def test_a_tracer_that_takes_dtensors_sees_the_whole_state(no_gc, monkeypatch):
    """Trap: the first mode is shown DTensors of the global shape, and must leave them to their own dispatch."""
    monkeypatch.setattr(minimal_tracer, "is_traceable_wrapper_subclass_type", lambda kind: False)
    peaks = window(8, lambda: sharded(8))
    assert peaks[1] > 72.2 * 2**20


@pytest.mark.parametrize(
    ("quiet", "peak"),
    [
        (True, 120.1),
        pytest.param(False, 696.5, marks=pytest.mark.skipif(RELEASE != (2, 13), reason="other versions hide them")),
    ],
)
def test_shape_propagation_is_not_recorded(quiet, peak):
    """Trap: at the first use of an operator in a process DTensor computes shapes on tensors of the global shape."""
    code = (
        "import gc; gc.disable(); from tests.device.test_fake_group import *; "
        f"print(mib(window(8, lambda: sharded(8), quiet={quiet}, windows=1))[4])"
    )
    root = Path(__file__).parents[2]
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=root, check=True)
    assert float(run.stdout.split()[-1]) == peak


class CountsOperators(TorchDispatchMode):
    count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.count += 1
        return function(*args, **(kwargs or {}))


def test_sharding_makes_no_tensor_for_each_of_many_ranks():
    """With 9,999 ranks FSDP2's own cut makes 9,999 tensors of each parameter: minutes for one plan."""
    counts = {}
    for world in (4, 9999):
        with virtual_gpu(CardRules()) as gpu, fake_world(world):
            with torch.device(gpu.device):
                net = nn.Linear(8, 8)
            mesh = init_device_mesh(NAME, (world,))
            with CountsOperators() as counted:
                fully_shard(net, mesh=mesh)
            counts[world] = counted.count
    assert counts[9999] <= counts[4] + 8


@pytest.mark.parametrize(("size", "world"), [(8, 3), (7, 4), (5, 8), (1, 4), (0, 3), (6, 6), (9, 1)])
@pytest.mark.parametrize("dim", [0, 1])
def test_shards_are_those_of_fsdp2(size, world, dim):
    tensor = torch.arange(size * 2).reshape((size, 2) if dim == 0 else (2, size))
    expected = getattr(fsdp_param, CHUNKS)(tensor, world, dim=dim)
    shards = Chunks(tensor, world, dim=dim)
    assert len(shards) == len(expected) == world
    for shard, same in zip(shards, expected, strict=True):
        assert shard.shape == same.shape
        assert shard.stride() == same.stride()
        assert torch.equal(shard, same)
    assert torch.equal(shards[-1], expected[-1])
    assert len(shards[1:]) == world - 1


def test_the_group_is_gone_afterwards():
    with virtual_gpu(CardRules()), fake_world(4, rank=3):
        assert torch.distributed.get_world_size() == 4
        assert torch.distributed.get_rank() == 3
    assert not torch.distributed.is_initialized()


def test_code_that_asks_for_its_rank_finds_the_predicted_world(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    for world, engine, rank in ((1, "single", 0), (4, "ddp", 2)):
        seen = []

        class Asks(JOBS["convolution"]):
            def nets(self, seen=seen):
                names = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
                seen.append((dist.get_rank(), dist.get_world_size(), *map(os.environ.get, names)))
                return super().nets()

            def loss(self, nets, batch):
                dist.barrier()
                return super().loss(nets, batch)

        predict(
            Asks(), "asks", Shape(items=2, length=None), find_device("rtx4090"), engine=engine, world=world, rank=rank
        )
        local = str(rank) if world > 1 else None
        assert seen[-1] == (rank, world, str(rank), str(world), local)
        assert all(numbers[1] == world for numbers in seen)
    assert not dist.is_initialized()
    assert "RANK" not in os.environ


def test_a_mesh_takes_its_ranks_by_name_as_torch_gives_them():
    """torch 2.6 does; so may a job."""
    with fake_world(4):
        mesh = DeviceMesh("cpu", mesh=[0, 1, 2, 3], mesh_dim_names=("dp",))
        assert mesh.size() == 4
