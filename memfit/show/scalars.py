"""A run's numbers for TensorBoard and Weights & Biases, from the lines of metrics.jsonl."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from memfit.errors import InputError, install_extra, is_installed


def scalars(line: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, float]]:
    """The numbers of a line by name, those of a table as ``table/name``; lists, texts and unknowns are left out."""
    for name, value in line.items():
        if isinstance(value, Mapping):
            yield from scalars(value, f"{prefix}{name}/")
        elif isinstance(value, int | float) and not isinstance(value, bool) and name not in ("window", "epoch"):
            yield prefix + name, float(value)


def has_tensorboard() -> bool:
    """Whether TensorBoard is installed."""
    return is_installed("tensorboard")


class TensorBoard:
    """Writes a run's scalars where ``tensorboard --logdir RUN`` finds them; a step is a window."""

    def __init__(self, folder: Path) -> None:
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._writer = EventFileWriter(str(folder))

    def line(self, line: dict[str, Any]) -> None:
        """One window is done."""
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary

        values = [Summary.Value(tag=name, simple_value=value) for name, value in scalars(line)]
        self._writer.add_event(Event(wall_time=time.time(), step=line["window"], summary=Summary(value=values)))
        self._writer.flush()

    def close(self) -> None:
        """Writes what is left."""
        self._writer.close()


class Wandb:
    """Keeps a run's scalars offline for Weights & Biases; ``wandb sync`` sends them where the person wants to."""

    def __init__(self, folder: Path, plan: Mapping[str, Any]) -> None:
        if not is_installed("wandb"):
            raise InputError("--wandb", "wandb is not installed", f"run {install_extra('wandb')}, or leave --wandb out")
        os.environ.setdefault("WANDB_SILENT", "true")
        logging.getLogger("wandb").setLevel(logging.ERROR)
        import wandb

        self._run = wandb.init(
            mode="offline", project="memfit", name=folder.resolve().name, dir=str(folder), config=dict(plan)
        )

    def line(self, line: dict[str, Any]) -> None:
        """One window is done."""
        self._run.log(dict(scalars(line)), step=line["window"])

    def close(self) -> None:
        """Ends the run's record."""
        self._run.finish()
