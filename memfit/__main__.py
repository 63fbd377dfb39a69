"""``memfit`` and ``python -m memfit``: the command line, in a process of its own."""

import atexit
import os
import signal
from contextlib import suppress

STOPPED = 5
"""``memfit.errors.Exit.STOPPED``, before anything else of memfit is imported."""


def main() -> None:
    """Runs one verb. A signal to stop is one line from the first import on; once the verb has ended, it changes
    nothing."""
    numbers = own_signals()
    for number in numbers:
        signal.signal(number, end_at_once)
    from memfit.process_end import QuickEnd
    from memfit.standard_streams import open_standard_streams

    open_standard_streams()
    end = QuickEnd()
    atexit.register(end)  # before any other handler, so that it is the last
    from memfit.interruption import interrupted_by
    from memfit.no_memory import check_start, end_without_memory, says_no_memory

    try:
        check_start()
        from memfit.cli import main as run_verb

        with interrupted_by(numbers):
            run_verb()
    except SystemExit as left:
        end.code = left.code
        raise
    except (MemoryError, OSError, SystemError, ImportError) as error:
        if not says_no_memory(error):
            raise
        end_without_memory()
    finally:
        with suppress(MemoryError, SystemError):  # the verb has said why it ends
            for number in numbers:
                signal.signal(number, signal.SIG_IGN)


def own_signals() -> list[int]:
    """The signals that would end this process as Python starts it: not those that nohup or a shell has it ignore."""
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    return [number for number in numbers if signal.getsignal(number) in (signal.default_int_handler, signal.SIG_DFL)]


def end_at_once(number: int, frame: object) -> None:
    """A handler for the first imports: one that is interrupted may turn the interrupt into an error of its own."""
    try:
        os.write(2, b"memfit: stopped\n")
    finally:
        os._exit(STOPPED)


if __name__ == "__main__":
    main()
