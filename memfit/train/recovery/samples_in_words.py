"""Samples that do not fit alone, in words: their numbers, units and tensors."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from memfit.apply.losses import MicroBatch
from memfit.job import Job
from memfit.nested_tensors import tensors_in
from memfit.torch_compat import FakeTensorMode
from memfit.train.recovery.failure import Ids, clear_frames


def samples_in_words(job: Job, ids: Ids, cost: Callable[[Ids], int], remake: Callable[[Ids], MicroBatch]) -> str:
    """The subject of a sentence about these samples, with its verb.

    Args:
        cost: padded units of samples together.
        remake: a micro-batch of them.
    """
    name = f"sample {ids[0]}" if len(ids) == 1 else f"samples {', '.join(map(str, ids))} (BatchNorm needs two)"
    units = "" if job.unit == "samples" else f" of {cost(ids)} {job.unit}"
    return f"{name}{units}, tensors {_shapes(ids, remake)}, {'does' if len(ids) == 1 else 'do'}"


def _shapes(ids: Ids, remake: Callable[[Ids], MicroBatch]) -> str:
    """Of a batch of these samples; where there is no memory for it either, of one without memory."""
    modes: list[AbstractContextManager[Any]] = [nullcontext(), FakeTensorMode(allow_non_fake_inputs=True)]
    for mode in modes:
        try:
            with mode:
                return ", ".join(str(tuple(tensor.shape)) for tensor in tensors_in(remake(ids).fetch()))
        except Exception as error:  # a job's collate may do what a tensor without memory cannot
            clear_frames(error)
    return "of unknown shapes"
