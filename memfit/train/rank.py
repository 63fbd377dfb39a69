"""What torchrun starts, once for each rank; ends at once where this launch must not go on, before torch is imported."""

from __future__ import annotations

import sys
from pathlib import Path

from memfit.engine.place import is_restart
from memfit.train.launch import ended_before
from memfit.train.parent import die_with_parent


def main(arguments: list[str]) -> int:
    """Trains as ``memfit.train.child`` does, with the same arguments."""
    before = ended_before(Path(arguments[0])) if is_restart() else None
    if before is not None:
        return before
    from memfit.train import child

    return child.main(arguments)


if __name__ == "__main__":
    die_with_parent()
    sys.exit(main(sys.argv[1:]))
