"""What a session's traces depend on and change, so that one of several copies of a session can trace for another."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

import numpy as np

from memfit.trace.tracer import Tracer


@dataclass(frozen=True, kw_only=True)
class SessionState:
    """What a trace of a micro-batch depends on, beside its arguments. Equal states give equal traces."""

    cudnn_plans: frozenset[tuple[Any, ...]]
    """Passes of convolutions for which cuDNN has searched its plans."""
    cublas_threads: frozenset[bool]
    """The threads that have a cuBLAS workspace: the forward's (False), the backward's (True)."""
    digest: bytes
    """Of the modules' paths, of the bytes and category of each storage that is alive, and of Python's and numpy's
    random numbers."""


@dataclass(frozen=True, kw_only=True)
class TraceNotes:
    """What a trace tells of the nets beside its events."""

    overwritten: frozenset[int]
    """As ``Tracer.overwritten``."""
    operators: Counter[str]
    """As ``NetKind`` counts them."""
    types: Counter[Any]
    """Types of the operators' first arguments."""


def state_of(tracer: Tracer, alive: Sequence[int]) -> SessionState:
    """The state of a session with these storages alive."""
    rows = [(tracer.nbytes[i], tracer.category[i], tracer.stream[i]) for i in alive]
    parts = ("\n".join(tracer.modules), rows, random_numbers())
    return SessionState(
        cudnn_plans=frozenset(tracer.call_memory.plans),
        cublas_threads=tracer.call_memory.cublas_threads,
        digest=blake2b(repr(parts).encode()).digest(),
    )


def random_numbers() -> bytes:
    """The state of Python's and numpy's random numbers, which a job's own code may draw from."""
    numpy_state = np.random.get_state(legacy=False)["state"]
    return repr((random.getstate(), np.asarray(numpy_state["key"]).tobytes(), numpy_state["pos"])).encode()


def notes_of(tracer: Tracer) -> TraceNotes:
    """What all traces have told so far."""
    kind = tracer.net_kind
    return TraceNotes(
        overwritten=frozenset(tracer.overwritten), operators=Counter(kind.counts), types=Counter(kind.types)
    )


def notes_since(tracer: Tracer, before: TraceNotes) -> TraceNotes:
    """What traces have told since then."""
    now = notes_of(tracer)
    return TraceNotes(
        overwritten=now.overwritten - before.overwritten,
        operators=now.operators - before.operators,
        types=now.types - before.types,
    )


def add_notes(tracer: Tracer, notes: TraceNotes) -> None:
    """Adds what a trace told in another copy."""
    tracer.overwritten |= notes.overwritten
    tracer.net_kind.counts += notes.operators
    tracer.net_kind.types += notes.types
