"""A job's nets as one rank of a mesh has them before data parallelism: their layers are cut, nothing is sharded.

Of the stages of a pipeline, whose cut is chosen later, a rank has an equal share: no cut has less on every rank.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from memfit.apply.build_nets import nets_of
from memfit.engine.capabilities import CAPABILITIES, engine_of
from memfit.engine.expert_parallel import experts_of
from memfit.engine.factory import make_engine
from memfit.engine.sharded_units import units
from memfit.job import Job, Nets, is_trained
from memfit.mesh import MeshShape
from memfit.planner.timing.mesh_time import DataTraffic, pieces_of
from memfit.torch_compat.attributes import local_tensor
from memfit.trace.tracer import Tracer


@dataclass(frozen=True, kw_only=True)
class RankNets:
    """Bytes of the parameters of one rank's replica."""

    trained_bytes: int
    frozen_bytes: int
    units: int
    """Modules of trained nets that FSDP2 gathers one by one."""
    expert_bytes: int = 0
    """Of ``trained_bytes``, those of experts whose ranks send each other tokens, which ``dp_shard`` alone shards."""

    def traffic(self, engine: str) -> DataTraffic:
        """What data parallelism carries of them."""
        pieces = pieces_of(self.trained_bytes, self.units if CAPABILITIES[engine].shards_weights else None)
        beside = self.expert_bytes
        return DataTraffic(nbytes=self.trained_bytes - beside, pieces=pieces, expert_bytes=beside)


def without_data_ranks(mesh: MeshShape) -> MeshShape:
    """The mesh's dimensions over which nets, or the sequences that they compute, are cut."""
    return replace(mesh, dp_replicate=1, dp_shard=1)


def rank_nets(job: Job, mesh: MeshShape, nets: Nets) -> RankNets:
    """The nets of rank 0 of a mesh, built on tensors without bytes.

    Args:
        nets: whole ones, for meshes that cut nothing.

    Raises:
        InputError: a net cannot be cut so.
    """
    cut = replace(without_data_ranks(mesh), pp=1, cp=1, dp_shard_in_ep=mesh.sending)
    return _counted(nets if cut.world == 1 else _cut(job, cut), mesh)


def _cut(job: Job, mesh: MeshShape) -> Nets:
    from memfit.device.virtual.fake_group import predicted_ranks
    from memfit.device.virtual.library_patches import as_in_a_real_run
    from memfit.device.virtual.virtual_device import virtual_cpu
    from memfit.torch_compat import disable_current_modes

    with disable_current_modes(), virtual_cpu() as virtual, as_in_a_real_run():
        tracer = Tracer(virtual)
        with predicted_ranks(mesh.world, quiet=tracer.quiet, mesh=str(mesh)), tracer.recording():
            engine = make_engine(engine_of(mesh), virtual.device, mesh)
            return engine.place(job, nets_of(job, virtual.device))


def _counted(nets: Nets, mesh: MeshShape) -> RankNets:
    """Of nets that ranks have cut over all dimensions but ``pp``, whose stages share the trained ones. Beside experts,
    what is sharded over ``dp_shard_in_ep`` counts as a whole."""
    trained = [net for net in nets.values() if is_trained(net)]
    is_sharded = mesh.dp_shard_in_ep > 1
    modules = [module for net in trained for module in experts_of(net).values()] if is_sharded else []
    experts = {id(parameter) for module in modules for parameter in module.parameters()}
    shared = [
        (p, p.nbytes if is_sharded and id(p) not in experts else local_tensor(p).nbytes)
        for net in trained
        for p in net.parameters()
    ]
    beside = [parameter for net in nets.values() if not is_trained(net) for parameter in net.parameters()]
    frozen = sum(size for p, size in shared if not p.requires_grad)
    return RankNets(
        trained_bytes=sum(size for p, size in shared if p.requires_grad) // mesh.pp,
        frozen_bytes=frozen // mesh.pp + sum(local_tensor(parameter).nbytes for parameter in beside),
        units=max(sum(len(units(net)) for net in trained) // mesh.pp, 1),
        expert_bytes=sum(size for p, size in shared if p.requires_grad and id(p) in experts) // mesh.pp,
    )
