"""Standard streams that a shell or a service has closed (``>&-``): they read and write the null device instead."""

from __future__ import annotations

import os
import sys

_NAMES = ("stdin", "stdout", "stderr")


def open_standard_streams() -> None:
    """Opens each standard stream that is closed. Python has None in its place, and the next file that is opened would
    take its descriptor: what a library or a child writes to standard output would go into that file.
    """
    for number, name in enumerate(_NAMES):
        if getattr(sys, name) is not None:
            continue
        descriptor = os.open(os.devnull, os.O_RDWR)
        if descriptor == number:
            os.set_inheritable(descriptor, True)
        stream = os.fdopen(descriptor, "r" if name == "stdin" else "w", closefd=False)
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)
