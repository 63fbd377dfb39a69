"""What four ranks do in tests/engine/test_mesh_engines.py: torchrun … -m tests.engine.mesh_ranks FOLDER CASE…

A case is one of ``STEPS``, or STATES for checkpoints.
"""

import sys
from pathlib import Path

import torch
import torch.distributed as dist

from memfit.engine.factory import make_engine
from memfit.engine.process_group import join
from memfit.mesh import MeshShape
from tests.engine.rank_steps import train
from tests.engine.ranks import CPU
from tests.engine.zero_ranks import loaded, saved

HYBRID = MeshShape(dp_replicate=2, dp_shard=2)
STEPS = {
    "late units": {},
    "two nets": {},
    "blocks": {},
    "units before": {"sync_each_micro_batch": False},
    "stages, full": {},
}
"""Cases of ``rank_steps`` with the engine's choices."""
STATES = "states"
READERS = {"sharded": None, "hybrid": HYBRID}
"""Meshes that go on with what another one wrote."""


def main():
    join()
    folder, rank = Path(sys.argv[1]), dist.get_rank()
    results = {case: train(case, engine(HYBRID, **how)) for case, how in STEPS.items() if case in sys.argv[2:]}
    if STATES in sys.argv[2:]:
        results["saved"] = saved(engine(HYBRID), folder / "hybrid")
        results |= {
            (writer, reader): loaded(engine(mesh), folder / writer)
            for writer in ("hybrid", "single")
            for reader, mesh in READERS.items()
        }
    torch.save(results, folder / f"{rank}.pt")
    dist.destroy_process_group()


def engine(mesh, **how):
    return make_engine("fsdp2", CPU, mesh, **how)


if __name__ == "__main__":
    main()
