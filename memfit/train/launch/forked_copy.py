"""A job that forks, and whose forked process returns into the training, would train a second time: it is ended."""

from __future__ import annotations

import os
import sys
from types import TracebackType
from typing import NoReturn

from memfit.errors import Exit, describe


class ForkedCopyGuard:
    """Around calls of a job. A process that was forked inside and comes out, by a return or an exception, is ended
    here: it shares the run's files, and its sockets with the other ranks."""

    def __enter__(self) -> None:
        self._process = os.getpid()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if os.getpid() != self._process:
            _end(error)


def _end(error: BaseException | None) -> NoReturn:
    """Ends as Python would for ``sys.exit``; says in a line what else came out."""
    if isinstance(error, SystemExit) and (error.code is None or isinstance(error.code, int)):
        os._exit((error.code or 0) & 0xFF)
    came = "returned into the training" if error is None else f"raised {describe(error)}"
    line = f"memfit: a process that the job forked {came}: it is ended; write os._exit(0) where its work ends"
    print(line, file=sys.stderr, flush=True)
    os._exit(Exit.FAULT)
