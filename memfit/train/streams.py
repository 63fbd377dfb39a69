"""Random streams that belong to a micro-batch, not to a rank: the same draws wherever and whenever it is run.

A stream is a function of (seed, window, first sample of the micro-batch, purpose). So the same split of a window draws
the same noise and dropout on one rank and on many, and a run that is taken up again needs no state of them.
"""

from __future__ import annotations

import random

import numpy as np
import torch

COLLATE, LOSS = 0, 1


def seed_stream(seed: int, window: int, first_id: int, purpose: int) -> None:
    """Sets Python's, numpy's and torch's default generators."""
    low, high = np.random.SeedSequence([seed, window, first_id, purpose]).generate_state(2).tolist()
    random.seed(low)
    np.random.seed(low)
    torch.manual_seed(high << 32 | low)
