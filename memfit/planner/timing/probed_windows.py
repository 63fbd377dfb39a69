"""Windows that ``memfit probe`` really ran on this machine, kept: the planner's estimates are held to them."""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from memfit.device.hardware.catalogue import Device
from memfit.job import Job, Shape
from memfit.user_cache import is_amount, is_count, keep, read_kept

FILE = "probed.json"


@dataclass(frozen=True, kw_only=True)
class ProbedWindow:
    """One window that was run."""

    items: int
    length: int | None
    micro_batches: int
    checkpointing: Mapping[str, str]
    seconds: float

    @property
    def shape(self) -> Shape:
        return Shape(items=self.items, length=self.length)


def keep_probed(job: Job, device: Device, window: ProbedWindow) -> None:
    """Remembers a window in place of an earlier one of the same job and device."""
    with contextlib.suppress(OSError):
        keep(FILE, {**read_kept(FILE), _key(job, device): asdict(window)})


def probed(job: Job, device: Device) -> ProbedWindow | None:
    """The last window of this job, with these settings, that was run on this machine's device."""
    kept = read_kept(FILE).get(_key(job, device))
    if not isinstance(kept, dict) or kept.keys() != {field.name for field in fields(ProbedWindow)}:
        return None
    if not all(is_count(kept[name]) and kept[name] for name in ("items", "micro_batches")):
        return None
    if not (is_amount(kept["seconds"]) and kept["seconds"] and isinstance(kept["checkpointing"], dict)):
        return None
    return ProbedWindow(**kept) if kept["length"] is None or is_count(kept["length"]) else None


def _key(job: Job, device: Device) -> str:
    """The job's class and settings, the device's own name, and torch's threads and version."""
    import torch

    kind: Any = type(job)
    threads = 0 if device.is_cuda else torch.get_num_threads()
    settings = {name: value for name, value in job.settings().items() if name != "wrapper"}
    what = json.dumps(
        [kind.__module__, kind.__qualname__, settings, device.name, threads, torch.__version__], default=str
    )
    return hashlib.sha256(what.encode()).hexdigest()[:16]
