"""Live bytes: tensors' bytes alive after each event of a trace, as traced and as an option would change them.

An option's saving in a phase is how far the phase's peak falls. A card's allocator rounds every request up to
``GRAIN``. Left out: the rest of the allocator's blocks, and fragmentation.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

import numpy as np

from memfit.device.hardware.catalogue import Device
from memfit.events import ALLOCATE, CATEGORIES, FREE, Trace

GRAIN = 512
"""Bytes; c10/cuda/CUDACachingAllocator, ``kMinBlockSize``."""


@dataclass(frozen=True, kw_only=True, eq=False)
class LiveBytes:
    """A trace and its bytes."""

    trace: Trace
    nbytes: np.ndarray
    """int64 (S,): of each storage, rounded as the device does."""
    alive: np.ndarray
    """int64 (E,): after each event."""

    def peaks(self, alive: np.ndarray | None = None) -> dict[str, int]:
        """The most that is alive in each phase, or on its way in; ``setup`` belongs to ``train``."""
        alive = self.alive if alive is None else alive
        by_phase: dict[str, int] = {}
        for label, start, end in self.trace.phases:
            name = "train" if label == "setup" else label
            most = int(alive[max(start - 1, 0) : end].max(initial=0))
            by_phase[name] = max(by_phase.get(name, 0), most)
        return by_phase

    def less(self, storages: np.ndarray, nbytes: np.ndarray | None = None) -> np.ndarray:
        """int64 (E,): alive without these storages (bool, S), or with so many bytes less of each."""
        gone = (self.nbytes if nbytes is None else nbytes) * storages
        return self.alive - self._sums(gone)

    def before(self, phase: str) -> int:
        """Bytes alive where a phase begins."""
        start = next(start for name, start, _ in self.trace.phases if name == phase)
        return int(self.alive[start - 1]) if start else 0

    def of(self, category: str) -> np.ndarray:
        """bool (S,): storages that hold this."""
        holds: np.ndarray = self.trace.category == CATEGORIES.index(category)
        return holds

    def events_in(self, phases: Collection[str]) -> np.ndarray:
        """bool (E,): events of these phases."""
        inside = np.zeros(len(self.alive), bool)
        for name, start, end in self.trace.phases:
            inside[start:end] |= name in phases
        return inside

    def parts(self, names: Collection[str]) -> np.ndarray:
        """bool (E,): events of training windows in these parts, ``forward`` or ``optimizer``, say."""
        within = np.isin(np.array(self.trace.parts), list(names))[self.trace.operator_part[self.trace.operator]]
        return within & self.events_in(("train",))

    def _sums(self, nbytes: np.ndarray) -> np.ndarray:
        return np.cumsum(_signed(self.trace, nbytes))


def live_bytes_of(trace: Trace, device: Device) -> LiveBytes:
    """The bytes of a trace on a device."""
    nbytes = -(-trace.nbytes // GRAIN) * GRAIN if device.is_cuda else trace.nbytes.astype(np.int64)
    return LiveBytes(trace=trace, nbytes=nbytes, alive=np.cumsum(_signed(trace, nbytes)))


def highest(alive: np.ndarray, where: np.ndarray) -> int:
    """The most that is alive after these events (bool, E); 0 where there are none."""
    return int(alive[where].max(initial=0))


def fall(before: Mapping[str, int], after: Mapping[str, int]) -> dict[str, int]:
    """Bytes by which each phase's peak falls; a negative number means that it rises."""
    return {phase: before[phase] - after.get(phase, before[phase]) for phase in before}


def _signed(trace: Trace, nbytes: np.ndarray) -> np.ndarray:
    """int64 (E,): bytes that each event adds."""
    step = np.where(trace.kind == ALLOCATE, 1, np.where(trace.kind == FREE, -1, 0))
    signed: np.ndarray = step * nbytes[np.maximum(trace.storage, 0)]
    return signed
