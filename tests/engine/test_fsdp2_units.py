"""Which modules FSDP2 gathers one by one.

python -m pytest tests/engine/test_fsdp2_units.py
"""

import inspect
import re
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from memfit.device.hardware.catalogue import find_device
from memfit.engine import sharded_reads
from memfit.engine.sharded_units import LEAST, units
from memfit.errors import InputError
from memfit.job import Job, Shape
from memfit.mesh import MeshShape
from memfit.trace.step import Tracing, trace_job
from tests.engine.pipeline_jobs import Residual, Stacked, Stages


def block(nbytes):
    """A module of two layers with so many bytes of float32 in all, without its memory."""
    rest = nn.Linear(1, nbytes // 4 - 1, bias=False, device="meta")
    return nn.Sequential(nn.Linear(1, 1, bias=False, device="meta"), rest)


def net(blocks, beside):
    return nn.ModuleDict(
        {"blocks": nn.ModuleList(map(block, blocks)), "rest": nn.Linear(1, beside // 4, bias=False, device="meta")}
    )


def test_a_block_of_a_hundredth_of_the_net_is_gathered_alone_and_a_smaller_one_with_the_net():
    assert units(net([4000], 396_000)) == ["blocks.0", ""]
    assert units(net([4000], 396_400)) == [""]


def test_a_block_of_least_bytes_is_gathered_alone_however_large_the_net_is():
    assert units(net([LEAST], 200 * LEAST)) == ["blocks.0", ""]
    assert units(net([LEAST - 4], 200 * LEAST)) == [""]


class Borrowing(Stages):
    """The net computes with a layer of its first block by itself, as diffusers' DiT does with an embedding."""

    class Net(Stacked):
        def scale(self, tokens, x):
            return self.blocks[0].norm(x).mean(1, keepdim=True)


class Weighing(Stages):
    """The net calls a method of its first block that is not its forward, and reads a weight."""

    class Net(Stacked):
        def __init__(self):
            super().__init__()
            self.blocks[0] = Weighed(24)

        def scale(self, tokens, x):
            return self.blocks[0].weigh(x)


class Weighed(Residual):
    def weigh(self, x):
        return x * self.norm.weight


WINDOWS = 2
"""That a trace has."""
MESHES = [MeshShape(dp_shard=2), MeshShape(dp_shard=2, tp=2)]


def trace(job, mesh):
    how = Tracing(device=find_device("cpu"), engine="fsdp2", world=mesh.world, mesh=mesh)
    return trace_job(job, Shape(items=4), how)


def gathers(traced):
    """How often parameters of a block are copied out of what was gathered."""
    return sum(traced.names[number].startswith("fsdp.split_with_sizes_copy") for number in traced.operator_name)


@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_the_block_of_a_layer_that_is_called_without_it_is_gathered_for_the_call(mesh):
    borrowing, plain = (gathers(trace(job, mesh)) for job in (Borrowing(), Stages()))
    assert borrowing == plain + 2 * WINDOWS, "for its forward and for its backward"


@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_a_block_whose_method_reads_a_parameter_is_refused_by_its_name(mesh):
    with pytest.raises(InputError) as said:
        trace(Weighing(), mesh)
    line = str(said.value)
    assert "module net.blocks.0 on --engine fsdp2: a method of it that is not its forward reads parameters" in line
    assert "leave dp_shard out of the mesh" in line


@pytest.mark.parametrize("said", ["can't allocate memory: you tried", "Connection closed by peer [127.0.0.1]", "other"])
def test_a_block_that_fails_before_it_is_gathered_is_not_said_to_be_read_outside(said, monkeypatch):
    """Memory runs out, or a rank is lost, while its parameters are gathered."""
    sharded = nn.Sequential(nn.Linear(2, 2), nn.Tanh())
    monkeypatch.setattr(sharded_reads, "_unit_of", lambda net, path: path.partition(".")[0])
    monkeypatch.setattr(sharded_reads, "fsdp_groups", lambda block: [SimpleNamespace(is_unsharded=False)])

    def gather(*_):
        raise RuntimeError(said)

    sharded[0].register_forward_pre_hook(gather)
    with pytest.raises(RuntimeError, match=re.escape(said)), sharded_reads.sharded_reads({"net": sharded}):
        sharded(torch.ones(1, 2))


class Heads(nn.Module):
    """Divides its layer's outputs by a number of heads that does not follow the ranks."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        heads = self.up(x).view(len(x), 4, 2)
        return self.down(heads.flatten(1))


class Divided(Job):
    def nets(self):
        return {"net": nn.Sequential(Heads())}

    def optimizers(self, nets):
        return {"net": torch.optim.SGD(nets["net"].parameters(), lr=0.1)}

    def batch(self, shape):
        return torch.randn(shape.items, 8)

    def loss(self, nets, batch):
        return nets["net"](batch).sum(), len(batch)

    def parallelize(self, nets, mesh):
        parallelize_module(nets["net"], mesh, {"0.up": ColwiseParallel(), "0.down": RowwiseParallel()})


class Misread(Divided):
    """The loss reads the weight of a layer that is cut."""

    def loss(self, nets, batch):
        return (batch @ nets["net"][0].up.weight).sum(), len(batch)


class Selecting(Divided):
    """The loss passes on what the net's forward takes, as transformers' Trainer does with columns of a dataset."""

    def nets(self):
        return {"net": Between()}

    def loss(self, nets, batch):
        net, given = nets["net"], {"x": batch, "unused": batch}
        return net(**{key: given[key] for key in inspect.signature(net.forward).parameters}).sum(), len(batch)

    def parallelize(self, nets, mesh):
        parallelize_module(nets["net"], mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})


class Between(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down, self.norm = nn.Linear(8, 8), nn.Linear(8, 8), nn.LayerNorm(8)

    def forward(self, x):
        return self.norm(self.down(self.up(x)))


def test_a_net_that_is_cut_shows_the_arguments_that_its_forward_takes():
    assert trace(Selecting(), MeshShape(tp=2)).names


class Hollow(Divided):
    """A layer of its net has no outputs."""

    def nets(self):
        return {"net": nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 0))}


def test_a_parameter_without_elements_is_refused_by_its_name():
    with pytest.raises(InputError) as said:
        trace(Hollow(), MeshShape(dp_shard=2))
    assert "parameter net.1.weight on --engine fsdp2: its shape (0, 8) has no elements" in str(said.value)


class Transposed(Divided):
    """A weight of its net is a transposed tensor, as after ``.to(memory_format=torch.channels_last)``."""

    def nets(self):
        net = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
        net[1].weight = nn.Parameter(torch.randn(8, 8).T)
        return {"net": net}


@pytest.mark.parametrize("engine", ["fsdp2", "zero3"])
def test_a_parameter_that_does_not_lie_row_by_row_is_refused_by_its_name(engine):
    if engine == "zero3":
        pytest.importorskip("deepspeed")
    how = Tracing(device=find_device("cpu"), engine=engine, world=2)
    with pytest.raises(InputError) as said:
        trace_job(Transposed(), Shape(items=4), how)
    assert f"parameter net.1.weight on --engine {engine}: its elements do not lie row by row" in str(said.value)


def test_a_parameter_that_does_not_lie_row_by_row_is_on_every_replica():
    how = Tracing(device=find_device("cpu"), engine="ddp", world=2)
    assert trace_job(Transposed(), Shape(items=4), how).names


@pytest.mark.parametrize(
    ("job", "line"),
    [
        (Divided, "module net.0 on tp=2: its forward raises RuntimeError: shape '[4, 4, 2]' is invalid for input of"),
        (Misread, "the loss on tp=2: a parameter is read outside of the forward of a module that holds it"),
    ],
)
def test_what_a_module_raises_on_ranks_that_divide_it_is_said_with_its_name_and_the_dimension(job, line):
    with pytest.raises(InputError) as said:
        trace(job(), MeshShape(tp=2))
    assert str(said.value).startswith(line)
    assert ("leave tp out of the mesh, or mend the module" in str(said.value)) == (job is Divided)
