"""A table of measured runs (model, batch, measured_mib, naive_faketensor_mib), its labels and its halves."""

from __future__ import annotations

import csv
import hashlib
from dataclasses import dataclass
from pathlib import Path

from memfit.errors import InputError

MIB = 1 << 20
COLUMNS = ("model", "batch", "measured_mib", "naive_faketensor_mib")


@dataclass(frozen=True, kw_only=True)
class Run:
    """One measured run, and what the table alone says of it."""

    model: str
    batch: int
    measured_mib: float
    naive_mib: float
    """The table's own lower bound: twice the parameters, and the activations."""

    @property
    def label(self) -> str:
        """``ran``; ``does not fit``: stopped below what it needs at least, which is much; ``crashed``: the same of a
        run that needs little; ``ambiguous``: within 1.4 GB of the card's memory, where nobody knows how it ended."""
        if self.measured_mib < self.naive_mib + 1500:
            return "does not fit" if self.naive_mib > 25_000 else "crashed"
        return "ambiguous" if self.measured_mib > 39_000 else "ran"


def read_table(path: Path) -> list[Run]:
    """The rows of a CSV file.

    Raises:
        InputError: no such file, or other columns.
    """
    if not path.exists():
        raise InputError(f"--data {path}", "there is no such file", f"write a CSV file with {', '.join(COLUMNS)}")
    with path.open(newline="") as file:
        reader = csv.DictReader(file)
        missing = [name for name in COLUMNS if name not in (reader.fieldnames or ())]
        if missing:
            raise InputError(f"--data {path}", f"no column {missing[0]}", f"write the columns {', '.join(COLUMNS)}")
        return [
            Run(
                model=row["model"],
                batch=int(row["batch"]),
                measured_mib=float(row["measured_mib"]),
                naive_mib=float(row["naive_faketensor_mib"]),
            )
            for row in reader
        ]


def is_fitting_half(model: str) -> bool:
    """Whether a model's runs may be fitted on; errors are reported on the others."""
    return int(hashlib.sha256(f"memfit {model}".encode()).hexdigest(), 16) % 2 == 0


def models_in_order(runs: list[Run]) -> list[str]:
    """The table's models in an order that any first part of is a fair sample."""
    return sorted({run.model for run in runs}, key=lambda name: hashlib.sha256(f"o{name}".encode()).hexdigest())
