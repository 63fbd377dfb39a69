"""RunOptions: how a plan is run, from the command line to every process that trains."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """The options of ``memfit run``. They are handed to the training processes as JSON."""

    folder: str
    """The run's folder, which holds plan.toml."""
    windows: int | None = None
    """Optimizer steps; None: the job's own number."""
    resume: bool = False
    """Whether the run continues from its newest checkpoint."""
    keep: int = 2
    """Number of checkpoints that stay."""
    save_every: float = 60.0
    """Seconds between two checkpoints; 0: one after every window."""
    skip_oversized: bool = False
    """Whether a sample that does not fit alone is left out instead of ending the run."""
    verify_every: int = 0
    """Windows between two verifications on one device; 0: never."""
    patience: float | None = None
    """Seconds without progress after which the run ends; None: derived from the steps that were measured."""

    workers: int | None = None
    """Processes of each rank that read the data; 0: the process that trains; None: by what reading costs."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "folder", str(Path(self.folder)))

    def to_json(self) -> str:
        """The options in one line."""
        return json.dumps(asdict(self))

    @staticmethod
    def from_json(text: str) -> RunOptions:
        """Reads what ``to_json`` gave."""
        return RunOptions(**json.loads(text))
