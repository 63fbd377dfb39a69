"""``memfit`` and ``python -m memfit``: the command line, in a process of its own."""

import os
import signal
from typing import Any

_STOPPED = 5
"""``memfit.errors.Exit.STOPPED``, before anything of memfit is imported."""


def _stop(number: int, frame: Any) -> None:
    """Ends the process at once: an import that is interrupted may turn the interrupt into an error of its own."""
    os.write(2, b"memfit: stopped\n")
    os._exit(_STOPPED)


class InterruptedVerb(KeyboardInterrupt):
    """Ctrl-C. Where KeyboardInterrupt itself passes through ``exec``, as under a dataclass, Python ends by the signal,
    whatever was made of the exception (``run_eval_code_obj`` in Python/pythonrun.c)."""


def _interrupt(number: int, frame: Any) -> None:
    raise InterruptedVerb


def main() -> None:
    """Runs one verb. Ctrl-C is one line from the first import on; once the verb has ended, it changes nothing."""
    is_ours = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if is_ours:
        signal.signal(signal.SIGINT, _stop)
    from memfit.cli import main as run_verb

    try:
        if is_ours:
            signal.signal(signal.SIGINT, _interrupt)
        run_verb()
    finally:
        signal.signal(signal.SIGINT, signal.SIG_IGN)


if __name__ == "__main__":
    main()
