"""Random streams that belong to a micro-batch, not to a rank: the same draws wherever and whenever it is run.

A stream is a function of (seed, window, first sample of the micro-batch, purpose). So the same split of a window draws
the same noise and dropout on one rank and on many, and a run that is taken up again needs no state of them. Reading and
collating have a stream, and the loss its own: a batch may be read long before, and in another process.
"""

from __future__ import annotations

import random
from hashlib import blake2b

import numpy as np
import torch

COLLATE, LOSS, STREAM = 0, 1, 3


def seed_stream(seed: int, window: int, first_id: int, purpose: int) -> None:
    """Sets Python's, numpy's and torch's default generators. ``torch.manual_seed`` takes 0.2 ms without a card."""
    parts = f"{seed} {window} {first_id} {purpose}".encode()
    own = int.from_bytes(blake2b(parts, digest_size=8).digest(), "little")
    random.seed(own % 2**32)
    np.random.seed(own % 2**32)
    torch.default_generator.manual_seed(own)
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed_all(own)


def seed_all(seed: int) -> None:
    """Random numbers of every kind begin here."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)
