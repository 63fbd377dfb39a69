"""Where a watch writes its lines: a metrics file for each rank, TensorBoard and Weights & Biases for rank 0.

What cannot be written any more (a full disk) is said once and left out: a training does not end for its metrics.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch.distributed as dist

from memfit.errors import unwritable
from memfit.show.scalars import TensorBoard, Wandb

FLUSH_EVERY = 1.0
"""Seconds between two writes to the disk."""


def own_rank() -> int:
    """This process's rank: the process group's, or a launcher's variable; 0 without one."""
    if dist.is_available() and dist.is_initialized():
        return int(dist.get_rank())
    rank = os.environ.get("RANK", "0")
    return int(rank) if rank.isdecimal() else 0


class MetricsFile:
    """A JSON line for each step, in ``metrics.jsonl``; of rank 1 in ``metrics-rank1.jsonl``."""

    def __init__(self, out: str | Path, rank: int) -> None:
        """Raises InputError where the file cannot be written."""
        path = Path(out)
        self.path = path.with_name(f"{path.stem}-rank{rank}{path.suffix}") if rank else path
        self._flushed = time.perf_counter()
        try:
            self._file = open(self.path, "a", buffering=1 << 16)  # noqa: SIM115
        except OSError as error:
            raise unwritable(f"memfit.watch(out={str(out)!r})", error) from error

    def line(self, line: dict[str, Any]) -> None:
        """Writes a step."""
        self._file.write(_text(line))
        now = time.perf_counter()
        if now - self._flushed > FLUSH_EVERY:
            self._file.flush()
            self._flushed = now

    def close(self) -> None:
        """Writes what is left."""
        self._file.close()


class StepOutputs:
    """All places to which a watch writes."""

    def __init__(
        self, out: str | Path | None, tensorboard: str | Path | None, wandb: str | Path | None, known: dict[str, int]
    ) -> None:
        rank = own_rank()
        self._outputs: dict[str, Any] = {}
        if out is not None:
            file = MetricsFile(out, rank)
            self._outputs[str(file.path)] = file
        if tensorboard is not None and not rank:
            self._outputs[f"TensorBoard's {tensorboard}"] = TensorBoard(Path(tensorboard))
        if wandb is not None and not rank:
            self._outputs[f"W&B's {wandb}"] = Wandb(Path(wandb), known)

    def line(self, line: dict[str, Any]) -> None:
        """Writes a step everywhere."""
        for name, output in self._outputs.items():
            try:
                output.line(line)
            except OSError as error:
                self._leave_out(name, error)
                return

    def close(self) -> None:
        """Files are whole. It can be called again."""
        for name, output in self._outputs.items():
            try:
                output.close()
            except OSError as error:
                _say(name, error)
        self._outputs = {}

    def _leave_out(self, name: str, error: OSError) -> None:
        _say(name, error)
        self._outputs = {other: output for other, output in self._outputs.items() if other != name}


def _say(name: str, error: OSError) -> None:
    sys.stderr.write(f"memfit: {name} cannot be written: {error.strerror or error}; the training goes on without it\n")


def _text(line: dict[str, Any]) -> str:
    """A line of JSON; without a leak it holds finite numbers alone, for which this is half of what json takes."""
    if "leak" in line:
        return json.dumps(line) + "\n"
    return "{" + ", ".join([f'"{name}": {value}' for name, value in line.items()]) + "}\n"
