"""Several ranks on this machine, started and started again by torchrun.

torchrun starts all ranks again when one ends with a code other than 0. A run that must not go on (bad input, stopped)
writes its outcome (``outcome``), and the ranks that are started again end at once with that code.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from memfit.child_process import children, kill_children
from memfit.engine.capabilities import WHOLE_STATE
from memfit.errors import Exit, InputError, describe
from memfit.plan import Plan
from memfit.train.launch.crash_stacks import describe_crash
from memfit.train.launch.outcome import read_outcome
from memfit.train.launch.stop_signals import SIGNALS
from memfit.train.run_folder import RunFolder

if TYPE_CHECKING:
    from memfit.engine.node_rendezvous import Meeting

MAX_RESTARTS = 3
"""torchrun's own default for an elastic run."""
SHUTDOWN_SECONDS = 9
"""Seconds after which ranks that were asked to stop are killed; each ends by itself before (``watchdog``)."""


def restarts(plan: Plan) -> int:
    """Starts after the first: of sharded ranks one more for each time that a micro-batch or validation is halved."""
    return MAX_RESTARTS + (0 if plan.engine in WHOLE_STATE else 2 * plan.micro_batch.bit_length())


@contextmanager
def _handlers_restored() -> Iterator[None]:
    """torchrun replaces this process's handlers of signals for good; behind this context those before stand again."""
    numbers = {*SIGNALS, signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT}
    before = {number: signal.getsignal(number) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            if handler is not None and signal.getsignal(number) is not handler:
                signal.signal(number, handler)


def torchrun(
    ranks: int,
    module: str,
    arguments: Sequence[str],
    folder: Path,
    max_restarts: int = MAX_RESTARTS,
    meeting: Meeting | None = None,
    *,
    resumable: bool = True,
) -> int:
    """Runs a module in so many processes by torchrun, in this process; gives an exit code of memfit.

    No rank is left when it returns or raises.

    Args:
        ranks: processes on this machine.
        meeting: where this machine meets the others of the run; None: it is the only one.
        resumable: whether what ended can be resumed; else ranks that were told to stop are not spoken of, since the one
            that ended first has said why.

    Raises:
        InputError: the system does not start so many processes.
    """
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.elastic.rendezvous import RendezvousError
    from torch.distributed.run import get_args_parser, run

    from memfit.engine import node_rendezvous

    for name in logging.root.manager.loggerDict:  # each has a level of its own
        if name.startswith("torch.distributed.elastic"):
            logging.getLogger(name).setLevel(logging.CRITICAL)
    logging.getLogger("torch.distributed.run").setLevel(logging.ERROR)
    os.environ.setdefault("OMP_NUM_THREADS", str(max((os.cpu_count() or 1) // ranks, 1)))
    node_rendezvous.register_rendezvous()
    if meeting is None:
        meeting = node_rendezvous.serve(node_rendezvous.Nodes(), uuid.uuid4().hex)
    options = ["--rdzv-backend", node_rendezvous.BACKEND, "--rdzv-id", meeting.run_id]
    options += ["--nnodes", str(meeting.nodes.count)]
    options += ["--nproc-per-node", str(ranks), "--max-restarts", str(max_restarts)]
    options += ["--log-dir", os.devnull]  # a folder would be left in TMPDIR by a kill that nothing survives
    code: int = Exit.DONE
    parser, before = get_args_parser(), children()
    optional = {
        "--shutdown-timeout": str(SHUTDOWN_SECONDS),
        "--signals-to-handle": ",".join(number.name for number in (*SIGNALS, signal.SIGQUIT)),
    }
    known = parser.format_help()
    for name, value in optional.items():
        options += [name, value] if name in known else []  # not in every version of torch
    try:
        with _handlers_restored():
            run(parser.parse_args([*options, "-m", module, *arguments]))
    except ChildFailedError as error:
        code = _code_of(folder, [failure.exitcode for failure in error.failures.values()], resumable)
    except SignalException:
        code = Exit.STOPPED
    except RendezvousError as error:
        outcome = read_outcome(folder)
        code = Exit.STOPPED if outcome is None else outcome.code
        if outcome is None:
            print(f"memfit: the ranks of {meeting.nodes} end: {error}; go on with --resume", file=sys.stderr)
    except OSError as error:
        why = f"the system does not start so many: {describe(error)}"
        raise InputError(f"{ranks} ranks", why, "write fewer ranks, or raise the limits of this user") from error
    finally:
        kill_children(module, before)
    return code


def _code_of(folder: Path, exits: Sequence[int], resumable: bool) -> int:
    outcome = read_outcome(folder)
    if outcome is not None:
        return outcome.code
    if Exit.STOPPED in exits:
        if resumable:
            why = "ranks ended too often, out of memory or unable to write the run's folder"
            print(f"memfit: {why}; go on with --resume", file=sys.stderr)
        return Exit.STOPPED
    killed = [-code for code in exits if code < 0]
    if killed and (set(killed) != {signal.SIGTERM} or len(killed) == len(exits)):
        names = ", ".join(map(str, killed))
        again = " too often; go on with --resume" if resumable else ""
        print(f"memfit: ranks were killed by signal {names}{describe_crash(RunFolder(folder))}{again}", file=sys.stderr)
        return Exit.STOPPED
    return Exit.FAULT
