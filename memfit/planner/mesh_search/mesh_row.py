"""MeshRow: one mesh of a search, with what is known of it."""

from __future__ import annotations

from dataclasses import dataclass

from memfit.mesh import MeshShape

CHOSEN, FITS, TOO_LARGE, SLOWER, REFUSED = "chosen", "fits", "does not fit", "slower", "refused"
"""States of a mesh. SLOWER: its least time is longer than the plan's, so that nobody looked whether it fits."""


@dataclass(frozen=True, kw_only=True)
class MeshRow:
    """A mesh, and its best plan as far as the search went."""

    mesh: MeshShape
    engine: str
    state: str
    seconds: float | None = None
    """Of a window; of one that is slower, at least so many."""
    peak: int | None = None
    """Process bytes; of one that does not fit, at least so many."""
    arithmetic: str = ""
    policy: str = ""
    """What is recomputed."""
    traced: bool = False
    """Whether the plan was traced and replayed; else memory and time follow from another mesh that cuts nets alike."""
    remark: str = ""
    """Why it is refused, what was not looked at, and what an estimate leaves out."""
