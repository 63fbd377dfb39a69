"""A timm net's trace at any batch, from two traces, kept on disk."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from memfit import user_cache
from memfit.events import Trace

SMALL, LARGE = 8, 12
"""Batches that are traced. Every storage's bytes are a + b x batch."""
_TEXTS = ("names", "modules", "parts", "phases", "net_kind", "assumed")


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Traced:
    """A net's traces by batch; where ``derives``, the other batches follow from SMALL and LARGE."""

    traces: dict[int, Trace]
    derives: bool

    def at(self, batch: int) -> Trace:
        """The trace of a batch, either traced or derived.

        Raises:
            KeyError: neither.
        """
        if batch in self.traces:
            return self.traces[batch]
        if not self.derives or batch < 2:
            raise KeyError(batch)
        small, large = (self.traces[size].nbytes for size in (SMALL, LARGE))
        slope = (large - small) // (LARGE - SMALL)
        return dataclasses.replace(self.traces[SMALL], nbytes=small + slope * (batch - SMALL))


def trace_net(model: str, batches: list[int]) -> Traced:
    """Traces a net of timm as ``train.py`` trains it, see ``trace_batches``."""
    from bench.accuracy_parts.timm_job import Timm
    from memfit.device.hardware.catalogue import find_device
    from memfit.job import Shape
    from memfit.trace.step import Tracing, trace_job

    how = Tracing(device=find_device("a100-40gb"))

    def at(batch: int) -> Trace:
        return trace_job(Timm(model=model), Shape(items=batch), how)

    return trace_batches(at, batches)


def trace_batches(at: Callable[[int], Trace], batches: list[int]) -> Traced:
    """Traces at two batches, and at each of ``batches`` where the two do not give it."""
    traces = {SMALL: at(SMALL), LARGE: at(LARGE)}
    derives = _derives(traces[SMALL], traces[LARGE])
    for batch in batches:
        if batch not in traces and (not derives or batch < 2):
            traces[batch] = at(batch)
    return Traced(traces=traces, derives=derives)


def _derives(small: Trace, large: Trace) -> bool:
    same = all(np.array_equal(getattr(small, name), getattr(large, name)) for name in ("kind", "storage", "stream"))
    return same and not ((large.nbytes - small.nbytes) % (LARGE - SMALL)).any()


def stored(folder: Path, model: str, batches: list[int]) -> Traced:
    """``trace_net``, or what it wrote to the folder before.

    Raises:
        Exception: whatever the net's own code raises.
    """
    path = folder / f"{model}.npz"
    if path.exists():
        traced = _read(path)
        if (traced.derives and min(batches) >= 2) or all(batch in traced.traces for batch in batches):
            return traced
    traced = trace_net(model, batches)
    folder.mkdir(parents=True, exist_ok=True)
    _write(path, traced)
    return traced


def cache_folder() -> Path:
    """Where traces are kept: a folder for this state of the code that they depend on."""
    digest = hashlib.sha256(b"".join(path.read_bytes() for path in trace_sources()))
    return user_cache.cache_folder() / "accuracy" / digest.hexdigest()[:12]


def trace_sources() -> list[Path]:
    """The files that a trace depends on."""
    import memfit
    from bench.accuracy_parts import timm_job

    root = Path(memfit.__file__).parent
    sources = [path for part in ("device", "trace", "apply") for path in sorted((root / part).rglob("*.py"))]
    return [*sources, Path(timm_job.__file__)]


def _write(path: Path, traced: Traced) -> None:
    columns: dict[str, Any] = {}
    description: dict[str, Any] = {"derives": traced.derives, "batches": list(traced.traces)}
    for batch, trace in traced.traces.items():
        description[str(batch)] = {name: getattr(trace, name) for name in _TEXTS}
        for field in dataclasses.fields(Trace):
            if field.name not in _TEXTS:
                columns[f"{batch}.{field.name}"] = getattr(trace, field.name)
    temporary = path.with_suffix(f".{os.getpid()}.tmp")
    with temporary.open("wb") as file:
        np.savez_compressed(file, told=np.array(json.dumps(description)), **columns)
    temporary.replace(path)


def _read(path: Path) -> Traced:
    with np.load(path, allow_pickle=False) as file:
        description = json.loads(str(file["told"]))
        traces = {}
        for batch in description["batches"]:
            texts = description[str(batch)]
            texts = {name: texts[name] if name == "net_kind" else tuple(map(_frozen, texts[name])) for name in _TEXTS}
            columns = {
                field.name: file[f"{batch}.{field.name}"]
                for field in dataclasses.fields(Trace)
                if field.name not in _TEXTS
            }
            traces[batch] = Trace(**columns, **texts)
    return Traced(traces=traces, derives=description["derives"])


def _frozen(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value
