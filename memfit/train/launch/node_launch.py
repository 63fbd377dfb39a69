"""How the machines of one run come together, and how each learns how the launch ended.

The first node prepares the run's folder, serves the store and judges the launch. Another node looks for a file in the
folder whose name it reads from the store. Where it finds none, they share no file system: it makes a folder of its own,
ranks send each other what they need of checkpoints (``node_folders``), and how the launch ended goes through the store.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import partial
from pathlib import Path

import torch.distributed as dist

from memfit.atomic_file import write_atomic
from memfit.engine.node_rendezvous import NODE_SECONDS, Meeting, serve
from memfit.engine.nodes import Nodes
from memfit.errors import InputError
from memfit.train.launch.outcome import read_outcome
from memfit.train.launch.watchdog import clear_earlier
from memfit.train.run_folder import RunFolder

TOKEN, OUTCOME = "token", "outcome"
OWN_FOLDER = ".separate"
"""A file in the folder of a node that does not share the first node's."""
_SHARES_EVERY = 0.2
_TRY = timedelta(seconds=2)
"""How long one attempt to reach the first node takes."""
_SAYS_AFTER = 5.0
"""Seconds after which a node says for what it waits."""
_VISIBLE_SECONDS = 30.0
"""Seconds that a network's file system may take to show a file of another node."""
_ACKNOWLEDGED_SECONDS = 10.0


@contextlib.contextmanager
def meet(nodes: Nodes, folder: Path, is_stopped: Callable[[], bool] = lambda: False) -> Iterator[Meeting]:
    """Opens a run's store on the first node, or reaches it from another one.

    Args:
        is_stopped: whether this process has been sent a signal to stop, while nodes are waited for.

    Raises:
        InputError: the address cannot be served or reached, or this node's own folder cannot be made.
    """
    if nodes.rank == 0:
        token = uuid.uuid4().hex
        mark = _mark(folder, token)
        try:
            meeting = serve(nodes, f"memfit-{token}", partial(_is_over, folder), is_stopped)
        except OSError as error:
            why = f"node 0 cannot listen there: {error.strerror}"
            raise InputError(f"--rdzv-endpoint {nodes.host}:{nodes.port}", why, "write another port") from error
        for left in folder.glob(".nodes-*"):
            left.unlink(missing_ok=True)
        mark.touch()
        meeting.store.set(TOKEN, token)
        try:
            yield meeting
        finally:
            for left in folder.glob(".nodes-*"):
                left.unlink(missing_ok=True)
        return
    store = _reach(nodes)
    token = store.get(TOKEN).decode()
    own = folder / OWN_FOLDER
    until = time.monotonic() + (0.0 if own.exists() else _VISIBLE_SECONDS)
    while not _mark(folder, token).exists() and time.monotonic() < until:
        time.sleep(0.2)
    separate = not _mark(folder, token).exists()
    if separate:
        RunFolder(folder).open(resume=True)
        own.touch()
        clear_earlier(RunFolder(folder))
        print(f"memfit: {folder} on node {nodes.rank} is not node 0's folder, which holds the run", file=sys.stderr)
    over, run_id = partial(_is_over, folder), f"memfit-{token}"
    yield Meeting(nodes, run_id, store, over, is_stopped, is_separate=separate)


@contextlib.contextmanager
def shared_outcome(meeting: Meeting, folder: Path) -> Iterator[None]:
    """While this is open, how a launch ended is told to the other nodes, and what they tell is written into the folder.

    A node that shares the first one's folder has nothing to tell.
    """
    if meeting.nodes.rank > 0 and not meeting.is_separate:
        yield
        return
    closed = threading.Event()
    thread = threading.Thread(target=_share_outcome, args=(meeting, folder, closed), name="memfit-outcome", daemon=True)
    thread.start()
    try:
        yield
    finally:
        closed.set()
        thread.join()


def _share_outcome(meeting: Meeting, folder: Path, closed: threading.Event) -> None:
    nodes, file = meeting.nodes, folder / f".ended-{meeting.run_id}"
    with contextlib.suppress(RuntimeError, OSError):
        store = dist.TCPStore(nodes.host, meeting.store.port, is_master=False, timeout=_TRY, wait_for_workers=False)
        while not closed.wait(_SHARES_EVERY):
            _exchange(store, file)
        _exchange(store, file)


def _exchange(store: dist.TCPStore, file: Path) -> None:
    is_shared = store.check([OUTCOME])
    if file.exists() and not is_shared:
        store.compare_set(OUTCOME, "", file.read_text())
    elif is_shared and not file.exists():
        write_atomic(file, store.get(OUTCOME))


def await_outcome(meeting: Meeting, folder: Path) -> None:
    """On a node with a folder of its own: waits until the first node has said how the launch ended."""
    until = time.monotonic() + _ACKNOWLEDGED_SECONDS
    while read_outcome(folder) is None and time.monotonic() < until:
        with contextlib.suppress(RuntimeError):
            _exchange(meeting.store, folder / f".ended-{meeting.run_id}")
        time.sleep(_SHARES_EVERY)


def acknowledge(meeting: Meeting) -> None:
    """On another node: tells the first one that the outcome in the folder was read."""
    with contextlib.suppress(RuntimeError):
        meeting.store.add("acknowledged", 1)


def await_acknowledgements(meeting: Meeting) -> None:
    """On the first node: keeps the outcome and the store until every other node has read it, or is gone."""
    until = time.monotonic() + _ACKNOWLEDGED_SECONDS
    while int(meeting.store.add("acknowledged", 0)) < meeting.nodes.count - 1 and time.monotonic() < until:
        time.sleep(0.1)


def _is_over(folder: Path) -> bool:
    """Whether a rank has written how this launch ended."""
    return read_outcome(folder) is not None


def _mark(folder: Path, token: str) -> Path:
    return folder / f".nodes-{token}"


def _reach(nodes: Nodes) -> dist.TCPStore:
    """The first node's store, once it is there."""
    began, said = time.monotonic(), False
    while True:
        try:
            return dist.TCPStore(nodes.host, nodes.port, is_master=False, timeout=_TRY, wait_for_workers=False)
        except RuntimeError as error:
            waited = time.monotonic() - began
            if waited > NODE_SECONDS:
                where = f"--rdzv-endpoint {nodes.host}:{nodes.port}"
                why = f"node 0 was not there in {NODE_SECONDS:g} s"
                raise InputError(where, why, "start memfit run with --node-rank 0 there") from error
            if waited > _SAYS_AFTER and not said:
                said = True
                print(f"memfit: waiting for node 0 at {nodes.host}:{nodes.port}", file=sys.stderr)
        time.sleep(0.5)
