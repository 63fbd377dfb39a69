"""Work in processes of their own, answers as they come."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from typing import TypeVar

Given = TypeVar("Given")
Answer = TypeVar("Answer")


def each(work: Callable[[Given], Answer], given: Iterable[Given], workers: int) -> Iterator[Answer]:
    """``work`` of each, in any order; 0 workers: in this process."""
    if workers < 1:
        yield from map(work, given)
        return
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, mp_context=spawn) as pool:
        waiting = [pool.submit(work, item) for item in given]
        try:
            for done in as_completed(waiting):
                yield done.result()
        except KeyboardInterrupt:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
