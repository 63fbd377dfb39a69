"""Trains two windows of a test job under a real limit: python tests/budgeted.py NAME ITEMS LENGTH BUDGET SETTINGS.

Prints ``passed`` or ``failed: the allocator's message``.
"""

import json
import sys

from nets import JOBS

from memfit.apply.rig import build
from memfit.apply.window import run_window
from memfit.job import Shape
from memfit.train import limit
from memfit.train.child import warm_up
from memfit.trace.step import synthetic_micro_batch


def main() -> None:
    import torch

    name, items, length, budget, settings = sys.argv[1:]
    job = JOBS[name](**json.loads(settings))
    small = Shape(items=2, length=8 if length != "0" else None)
    train(job, Shape(items=int(items), length=int(length) or None))
    warm_up()
    limit.limit(int(budget))
    try:
        train(job, Shape(items=int(items), length=int(length) or None))
    except RuntimeError as error:
        if not limit.is_memory_failure(error):
            raise
        print("failed:", str(error)[-120:].replace("\n", " "))
        train(job, small)
        return
    print("passed")


def train(job, shape) -> None:
    rig = build(job, "cpu")
    micro = synthetic_micro_batch(job, shape, rig.device)
    for _ in range(2):
        run_window(rig, [micro])


main()
