"""memfit run --verify-every N: every N windows, what ranks did is done again on one device, from a copy of the state.

Before such a window the state is written to RUN/.proof/before, after it to RUN/.proof/after. A process of its own
(``memfit.verify.window_replay``) runs the same micro-batches alone and compares, while training goes on. It adds a
line to RUN/verified.jsonl. What differs is said at once and does not stop the run, which ends with exit code 4.

What it takes: two copies of the state on disk, and the memory of a run on one device beside the ranks'.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from memfit.apply.train_state import TrainState
from memfit.atomic_file import write_atomic
from memfit.engine.collectives import gather, gather_shares, reported
from memfit.errors import Exit, describe
from memfit.train.checkpoint.optimizer_state import has_optimizer_state
from memfit.train.checkpoint.sharded_checkpoint import save_sharded
from memfit.train.launch.memory_limit import is_memory_failure, small_stacks

REPLAY = "memfit.verify.window_replay"


@dataclass(kw_only=True)
class OnlineVerify:
    """One for each rank; rank 0's starts the process that compares."""

    run: Path
    every: int
    say: Callable[[str], None]
    failed: bool = False
    """Whether a window was not the same on one device."""
    _process: subprocess.Popen[bytes] | None = None
    _started: bool = False

    @property
    def _folder(self) -> Path:
        return self.run / ".proof"

    def begins(self, train_state: TrainState, window: int) -> bool:
        """Whether this window is one to prove; then its state is copied. Every rank calls it before the window.

        Not before every optimizer that keeps state has stepped, and not while the last proof is still at work.
        """
        stepped = has_optimizer_state(train_state)
        if (window + 1) % self.every or not stepped or any(gather(train_state.engine, self._busy())):
            return False
        if train_state.engine.rank == 0:
            shutil.rmtree(self._folder, ignore_errors=True)
        gather(train_state.engine, None)
        return self._copy(train_state, window, "before")

    def ends(
        self, train_state: TrainState, window: int, learnt: Sequence[tuple[int, ...]], losses: Mapping[str, float]
    ) -> None:
        """After it: what was learnt is copied, and compared beside the training. Every rank calls it."""
        ranks = gather_shares(train_state.engine, list(learnt))
        if not self._copy(train_state, window, "after") or train_state.engine.rank != 0:
            return
        report = {
            "window": window,
            "ranks": ranks,
            "losses": dict(losses),
            "engine": train_state.engine.name,
            "sharded_state": train_state.engine.sharded_state,
        }
        write_atomic(self._folder / "window.json", json.dumps(report))
        mine = {key: value for key, value in os.environ.items() if key not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
        self._started = True
        with small_stacks():
            self._process = subprocess.Popen([sys.executable, "-m", REPLAY, str(self.run)], env=mine, stdout=sys.stderr)

    def finish(self) -> bool:
        """Waits for the last one, on rank 0; gives whether all were the same."""
        if self._process is not None:
            self._process.wait()
            self._busy()
        if self._started:
            shutil.rmtree(self._folder, ignore_errors=True)
        return not self.failed

    def _busy(self) -> bool:
        if self._process is None:
            return False
        code = self._process.poll()
        if code is None:
            return True
        self._process = None
        self.failed |= code == Exit.CHECK_FAILED
        if code not in (Exit.DONE, Exit.CHECK_FAILED):
            self.say(f"a window was not proven: its process ended with code {code}")
        return False

    def _copy(self, train_state: TrainState, window: int, name: str) -> bool:
        fault = None
        try:
            save_sharded(train_state, self._folder / name)
        except Exception as error:
            if not isinstance(error, OSError) and not is_memory_failure(error):
                raise
            fault = describe(error)
        fault = reported(train_state.engine, fault)
        if fault is not None:
            self.say(f"window {window} is not proven: its state cannot be copied: {fault}")
        return fault is None
