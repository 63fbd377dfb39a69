"""The module that the process of ``memfit validate`` starts with.

It ends with the process that started it, which may be killed before torch is imported.
"""

import sys

from memfit.frame_room import in_frame_room
from memfit.garbage import frozen_imports
from memfit.printable import keep_terminal_safe
from memfit.train.launch.process_guard import die_with_parent
from memfit.train.launch.rank_entry import leave


@in_frame_room
def main(arguments: list[str]) -> int:
    """Validates as ``memfit.train.launch.validation_worker`` does, with the same arguments."""
    with frozen_imports():
        from memfit.train.launch import validation_worker

    return validation_worker.main(arguments)


if __name__ == "__main__":
    die_with_parent()
    keep_terminal_safe()
    leave(main(sys.argv[1:]), "the validation")
