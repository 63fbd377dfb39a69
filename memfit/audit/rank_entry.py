"""``python -m memfit.audit.rank_entry TARGET RANK WORLD FOLDER``: one process of a world that is really run."""

from __future__ import annotations

import os
import sys
import traceback
from pathlib import Path

import torch.distributed as dist

from memfit.audit.drawn_json import drawn_to_json
from memfit.audit.observe import run_rank
from memfit.audit.target import load_target
from memfit.child_process import die_with_parent
from memfit.errors import describe
from memfit.printable import keep_terminal_safe
from memfit.torch_compat.gloo import give_gloo_one_worker


def main(target: str, rank: int, world: int, folder: str) -> int:
    """Writes what the rank draws to the folder, or why it failed; returns the exit code."""
    try:
        give_gloo_one_worker()
        dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world)
        dist.init_process_group = lambda *args, **options: None
        drawn = run_rank(load_target(target), rank, world)
        Path(folder, f"{rank}.json").write_text(drawn_to_json(drawn), encoding="utf-8")
        if dist.is_initialized():
            dist.barrier()
    except BaseException as failure:
        traceback.print_exc()
        Path(folder, f"{rank}.failed").write_text(f"it raises {describe(failure)}", encoding="utf-8")
        return 1
    return 0


if __name__ == "__main__":
    die_with_parent()
    keep_terminal_safe()
    code = main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # gloo's threads, and workers of the target's loaders, are not waited for
