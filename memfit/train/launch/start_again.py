"""A training process that starts again: it is replaced by a new one with the same number."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import NoReturn

from memfit.engine.torchrun_env import RESTARTS
from memfit.train.run_options import RunOptions

UNPROVEN = "MEMFIT_UNPROVEN"
"""Set for a process that starts again because the trial of its first window could not be undone: names of the tensors
that its forwards changed, as JSON. The windows copy them from the first one on."""

_BEGAN_IN = os.getcwd()
"""The working folder, which the job may have left since."""


def changed_in_trial() -> tuple[str, ...] | None:
    """What ``start_again_unproven`` was given in the process before this one; None: it has not started again so."""
    names = os.environ.get(UNPROVEN)
    return None if names is None else tuple(json.loads(names))


def start_again_unproven(changed: Sequence[str]) -> NoReturn:
    """Starts again without a trial of every phase. All ranks do so.

    Args:
        changed: names of tensors that forwards changed in the trial.
    """
    os.environ[UNPROVEN] = json.dumps(changed)
    os.chdir(_BEGAN_IN)
    os.execv(sys.executable, sys.orig_argv)


def start_again_alone(options: RunOptions) -> NoReturn:
    """Starts a run on one device again from its newest checkpoint, as torchrun does with several ranks."""
    os.environ[RESTARTS] = str(int(os.environ.get(RESTARTS, "0")) + 1)
    os.chdir(_BEGAN_IN)
    os.execv(sys.executable, [*sys.orig_argv[:-1], replace(options, resume=True).to_json()])
