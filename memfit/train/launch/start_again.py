"""A training process that starts again: it is replaced by a new one with the same number."""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from typing import NoReturn

from memfit.engine.torchrun_env import RESTARTS
from memfit.train.run_options import RunOptions

UNPROVEN = "MEMFIT_UNPROVEN"
"""Set for a process that starts again because the trial of its first window could not be undone."""

_BEGAN_IN = os.getcwd()
"""The working folder, which the job may have left since."""


def start_again_unproven() -> NoReturn:
    """Starts again without a trial of every phase. All ranks do so."""
    os.environ[UNPROVEN] = "1"
    os.chdir(_BEGAN_IN)
    os.execv(sys.executable, sys.orig_argv)


def start_again_alone(options: RunOptions) -> NoReturn:
    """Starts a run on one device again from its newest checkpoint, as torchrun does with several ranks."""
    os.environ[RESTARTS] = str(int(os.environ.get(RESTARTS, "0")) + 1)
    os.chdir(_BEGAN_IN)
    os.execv(sys.executable, [*sys.orig_argv[:-1], replace(options, resume=True).to_json()])
