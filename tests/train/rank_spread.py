"""What ranks do in tests/train/test_sharded_checkpoint.py: torchrun … -m tests.train.rank_spread ENGINE save|load
STATE FOLDER."""

import sys
from pathlib import Path

import torch
import torch.distributed as dist

from memfit.engine.factory import make_engine
from memfit.engine.process_group import join
from tests.engine.ranks import CPU
from tests.engine.zero_ranks import loaded, saved


def main():
    join()
    kind, what, state, folder = sys.argv[1:]
    result = {"save": saved, "load": loaded}[what](make_engine(kind, CPU), Path(state))
    torch.save(result, Path(folder) / f"{kind}-{what}-{dist.get_rank()}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
