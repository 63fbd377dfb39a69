"""The older lines of a run's files: compressed parts beside the file that grows.

RUN/metrics.jsonl is compressed into metrics-FIRST-LAST.jsonl.gz (windows, from FIRST to LAST) when it has grown to
``PART_BYTES``, and begins anew; samples.jsonl likewise. A reader takes the parts and then the file. A run that was
killed after a part was written still has its lines in the file, too: those are left out.
"""

from __future__ import annotations

import gzip
import re
import shutil
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from memfit.atomic_file import open_atomic, write_atomic

PART_BYTES = 32 << 20
LEVEL = 1
"""Of compression: lines become about eight times smaller at 100 MB a second."""


@dataclass(frozen=True, kw_only=True)
class LinePart:
    """A compressed part: the lines of windows ``first`` to ``last``."""

    path: Path
    first: int
    last: int

    def lines(self) -> Iterator[bytes]:
        """Its lines; of a damaged part those that come before the damage."""
        try:
            with gzip.open(self.path, "rb") as file:
                yield from file
        except (OSError, EOFError, zlib.error):
            return


def parts_of(path: Path) -> list[LinePart]:
    """The parts of a file of lines, the oldest first."""
    pattern = re.compile(re.escape(path.stem) + r"-(\d+)-(\d+)\.jsonl\.gz")
    named = [(file, pattern.fullmatch(file.name)) for file in path.parent.glob(f"{path.stem}-*.jsonl.gz")]
    parts = [LinePart(path=file, first=int(match[1]), last=int(match[2])) for file, match in named if match is not None]
    return sorted(parts, key=lambda part: part.first)


def all_lines(path: Path, window: int | None = None) -> Iterator[bytes]:
    """The lines of the parts, and then of the file; none where it cannot be read.

    Args:
        window: parts without this window are left out.
    """
    for part in parts_of(path):
        if window is None or part.first <= window <= part.last:
            yield from part.lines()
    try:
        with open(path, "rb") as file:
            yield from file
    except OSError:
        return


def compress(path: Path, first: int, last: int) -> None:
    """Makes a part of all lines of a file, and an empty file in its place.

    Raises:
        OSError: the part cannot be written; the file is as it was.
    """
    target = path.with_name(f"{path.stem}-{first:09d}-{last:09d}.jsonl.gz")
    with open(path, "rb") as file, open_atomic(target) as written, gzip.open(written, "wb", LEVEL) as packed:
        shutil.copyfileobj(file, packed, 1 << 20)
    write_atomic(path, b"")
