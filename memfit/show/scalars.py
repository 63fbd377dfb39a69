"""A run's numbers for TensorBoard and Weights & Biases, from the lines of metrics.jsonl."""

from __future__ import annotations

import itertools
import logging
import os
import socket
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from memfit.errors import InputError, install_extra, is_installed

_numbers = itertools.count()


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
    """Writes a run's scalars where ``tensorboard --logdir RUN`` finds them; a step is a window.

    The file is written in the calling thread: TensorBoard's own writer has a thread, whose errors nobody hears.
    """

    def __init__(self, folder: Path) -> None:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.summary.writer.record_writer import RecordWriter

        folder.mkdir(parents=True, exist_ok=True)
        name = f"events.out.tfevents.{time.time():010.0f}.{socket.gethostname()}.{os.getpid()}.{next(_numbers)}"
        self._file = open(folder / name, "wb", buffering=0)  # noqa: SIM115
        self._writer = RecordWriter(self._file)
        self._write(Event(wall_time=time.time(), file_version="brain.Event:2"))

    def line(self, line: dict[str, Any]) -> None:
        """One window is done."""
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary

        values = [Summary.Value(tag=name, simple_value=value) for name, value in scalars(line)]
        self._write(Event(wall_time=time.time(), step=line["window"], summary=Summary(value=values)))

    def _write(self, event: Any) -> None:
        self._writer.write(event.SerializeToString())

    def close(self) -> None:
        """Closes the file."""
        self._file.close()


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
