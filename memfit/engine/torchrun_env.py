"""A process's place among those that torchrun started, by the environment that it sets."""

from __future__ import annotations

import os
from dataclasses import dataclass

RESTARTS = "TORCHELASTIC_RESTART_COUNT"
"""How often torchrun has started the processes of this launch again."""


@dataclass(frozen=True, kw_only=True)
class TorchrunEnv:
    """What torchrun tells a process of itself."""

    rank: int
    local_rank: int
    world: int
    local_world: int
    """Processes on this machine."""


def torchrun_env() -> TorchrunEnv | None:
    """This process's place among those that torchrun started; None where it was not."""
    try:
        return TorchrunEnv(
            rank=int(os.environ["RANK"]),
            local_rank=int(os.environ.get("LOCAL_RANK", os.environ["RANK"])),
            world=int(os.environ["WORLD_SIZE"]),
            local_world=int(os.environ.get("LOCAL_WORLD_SIZE", os.environ["WORLD_SIZE"])),
        )
    except (KeyError, ValueError):
        return None


def is_restart() -> bool:
    """Whether this process was started again in the same launch."""
    return int(os.environ.get(RESTARTS, "0")) > 0


def launch_suffix() -> str:
    """End of the names of files that this start of a launch's processes writes: ``.txt``, later ``.start-2.txt``."""
    count = os.environ.get(RESTARTS, "0")
    return ".txt" if count == "0" else f".start-{count}.txt"
