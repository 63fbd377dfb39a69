"""Trains two windows of a test job under a real limit: python tests/budgeted.py NAME ITEMS LENGTH BUDGET SETTINGS.

The same windows are trained once before, without a limit, so that libraries hold what they keep for these shapes.
Prints ``passed`` or ``failed: the allocator's message``.
"""

import json
import sys

from memfit.apply.train_state import build
from memfit.apply.window import run_window
from memfit.engine.collectives import is_memory_failure
from memfit.job import Shape
from memfit.trace.step_phases import synthetic_micro_batch
from memfit.train.launch import memory_limit
from memfit.train.launch.warm_up import warm_torch
from testing.nets import JOBS


def main() -> None:
    name, items, length, budget, settings = sys.argv[1:]
    job = JOBS[name](**json.loads(settings))
    shape = Shape(items=int(items), length=int(length) or None)
    train(job, shape)
    warm_torch()
    memory_limit.limit(int(budget))
    try:
        train(job, shape)
    except RuntimeError as error:
        if not is_memory_failure(error):
            raise
        print("failed:", str(error)[-120:].replace("\n", " "))
        return
    print("passed")


def train(job, shape) -> None:
    train_state = build(job, "cpu")
    micro = synthetic_micro_batch(job, shape, train_state.device)
    for _ in range(2):
        run_window(train_state, [micro])


main()
