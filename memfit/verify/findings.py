"""What verify finds, in words. A fault makes one device and many learn different things; a note says what to know."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class VerifyFinding:
    """One thing that was found."""

    code: str
    kind: Literal["fault", "note"]
    text: str
    world: int | None = None
    """The world in which it showed; None: it shows on one rank."""
