"""A rank that joins its group, sums over the ranks, and writes where it and the process above it listen."""

import json
import sys
from pathlib import Path

import psutil
import torch
import torch.distributed as dist

from memfit.child_process import die_with_parent
from memfit.engine.process_group import join


def listens(process: psutil.Process) -> list[str]:
    """Addresses of the sockets on which a process takes connections."""
    return [c.laddr.ip for c in process.net_connections(kind="inet") if c.status == psutil.CONN_LISTEN]


def main(folder: str) -> None:
    """Writes FOLDER/RANK.json."""
    die_with_parent()
    join()
    total = torch.ones(1)
    dist.all_reduce(total)
    mine = psutil.Process()
    seen = {"world": float(total), "rank": listens(mine), "launcher": listens(mine.parent())}
    Path(folder, f"{dist.get_rank()}.json").write_text(json.dumps(seen))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
