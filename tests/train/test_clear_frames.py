"""What an exception's frames hold is let go.

python -m pytest tests/train/test_clear_frames.py
"""

import weakref

import torch

from memfit.train.recovery.failure import clear_frames


def test_frames_of_an_error_that_is_the_cause_of_its_own_context_let_go():
    kept = []

    def fails():
        tensor = torch.ones(3)
        kept.append(weakref.ref(tensor))
        raise MemoryError

    try:
        try:
            fails()
        except MemoryError as error:
            raise RuntimeError from error
    except RuntimeError as error:
        first = error.__cause__
        first.__context__ = error
    clear_frames(first)
    assert kept[0]() is None
