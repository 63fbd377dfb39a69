"""Several ranks on this machine, started and started again by torchrun, and how they say why they ended.

torchrun starts all ranks again when one ends with a code other than 0. A run that must not go on (bad input, stopped)
says so in its folder, and the ranks that are started again end at once with that code.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import sys
import uuid
from collections.abc import Sequence
from pathlib import Path

from memfit.child_process import children, kill_children
from memfit.errors import Exit, InputError, describe
from memfit.plan import Plan

MAX_RESTARTS = 3
"""torchrun's own default for an elastic run."""
SHUTDOWN_SECONDS = 120
"""How long ranks may take to end a window and save, once they are asked to stop."""


def restarts(plan: Plan) -> int:
    """Starts after the first: of sharded ranks one more for each time that a micro-batch or validation is halved."""
    return MAX_RESTARTS + (0 if plan.engine in ("single", "ddp") else 2 * plan.micro_batch.bit_length())


def torchrun(ranks: int, module: str, arguments: Sequence[str], folder: Path, max_restarts: int = MAX_RESTARTS) -> int:
    """Runs a module in so many processes by torchrun, in this process; gives an exit code of memfit.

    No rank is left when it returns or raises.

    Raises:
        InputError: the system does not start so many processes.
    """
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import get_args_parser, run

    from memfit.engine import one_node_rendezvous

    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    logging.getLogger("torch.distributed.run").setLevel(logging.ERROR)
    os.environ.setdefault("OMP_NUM_THREADS", str(max((os.cpu_count() or 1) // ranks, 1)))
    one_node_rendezvous.register()
    options = ["--rdzv-backend", one_node_rendezvous.BACKEND, "--rdzv-id", uuid.uuid4().hex, "--nnodes", "1"]
    options += ["--nproc-per-node", str(ranks), "--max-restarts", str(max_restarts)]
    options += ["--shutdown-timeout", str(SHUTDOWN_SECONDS), "-m", module, *arguments]
    for left in folder.glob(".ended-*"):
        left.unlink()
    code: int = Exit.DONE
    before = children()
    try:
        run(get_args_parser().parse_args(options))
    except ChildFailedError as error:
        code = _code_of(folder, [failure.exitcode for failure in error.failures.values()])
    except SignalException:
        code = Exit.STOPPED
    except OSError as error:
        why = f"the system does not start so many: {describe(error)}"
        raise InputError(f"{ranks} ranks", why, "write fewer ranks, or raise the limits of this user") from error
    finally:
        kill_children(module, before)
    for left in folder.glob(".ended-*"):
        left.unlink()
    return code


def _code_of(folder: Path, exits: Sequence[int]) -> int:
    for note in folder.glob(".ended-*"):
        with contextlib.suppress(OSError, ValueError, KeyError):
            return int(json.loads(note.read_text())["code"])
    if Exit.STOPPED in exits:
        print("memfit: ranks ran out of memory too often; go on with --resume", file=sys.stderr)
        return Exit.STOPPED
    killed = [-code for code in exits if code < 0]
    if killed and (set(killed) != {signal.SIGTERM} or len(killed) == len(exits)):
        names = ", ".join(map(str, killed))
        print(f"memfit: ranks were killed by signal {names} too often; go on with --resume", file=sys.stderr)
        return Exit.STOPPED
    return Exit.FAULT


def ended_before(folder: Path) -> int | None:
    """The code with which this launch ended, where torchrun starts it again though it must not go on."""
    try:
        return int(json.loads(_note(folder).read_text())["code"])
    except (OSError, ValueError, KeyError):
        return None


def ends(folder: Path, code: int, line: str) -> int:
    """Notes that this launch is to end with a code; the first rank to do so prints why. Gives the code."""
    try:
        with open(_note(folder), "x") as file:
            json.dump({"code": code}, file)
    except OSError:
        return code
    print(f"memfit: {line}", file=sys.stderr, flush=True)
    return code


def _note(folder: Path) -> Path:
    return folder / f".ended-{os.environ.get('TORCHELASTIC_RUN_ID', 'once')}"
