"""A memory failure: what was asked for and what was held, in numbers and words, and how memory is let go afterwards."""

from __future__ import annotations

import ctypes
import gc
import re
import traceback
from dataclasses import dataclass

import torch

from memfit.errors import describe, message_of
from memfit.sizes import format_size
from memfit.train.launch import memory_limit

Ids = tuple[int, ...]
"""Numbers of samples in the data set."""


@dataclass(frozen=True, kw_only=True)
class Failure:
    """One memory failure: which part of which micro-batch asked for how much, and what was held then."""

    part: str
    micro_batch: int
    ids: Ids
    requested_bytes: int | None
    held_bytes: int
    """The process's bytes (of a card: allocated ones), before anything was let go."""
    message: str
    rank: int = 0
    """The rank on which it happened."""


def clear_frames(error: BaseException) -> None:
    """Lets go of what the frames of an exception, and of those it came of, still hold."""
    pending: list[BaseException | None] = [error]
    cleared: set[int] = set()
    while pending:
        link = pending.pop()
        if link is not None and id(link) not in cleared:  # an error may be the cause of its own context
            cleared.add(id(link))
            traceback.clear_frames(link.__traceback__)
            pending += [link.__cause__, link.__context__]
            link.__traceback__ = None


def give_back(device: torch.device) -> None:
    """Gives memory that nothing holds back to the system."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    else:
        ctypes.CDLL(None).malloc_trim(0)


def held_bytes(device: torch.device) -> int:
    """Allocated bytes of a card; of a CPU the process's own."""
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else memory_limit.resident_bytes()


_UNITS = {"bytes": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}


def requested_bytes(message: str) -> int | None:
    """How many bytes a failing allocator was asked for, by its own words; None where it does not say."""
    match = re.search(r"[Tt]ried to allocate ([\d.]+) (bytes|KiB|MiB|GiB)", message)
    return int(float(match[1].rstrip(".")) * _UNITS[match[2]]) if match else None


def describe_memory_failure(error: BaseException) -> str:
    """How much a failing allocator was asked for, in words; what the error says where that is not known."""
    asked = requested_bytes(message_of(error))
    return describe(error) if asked is None else f"{format_size(asked)} asked for"


def describe_request(failure: Failure, held_before: int = 0) -> str:
    """The request that failed, in words.

    Args:
        held_before: bytes that the process held before the job was built, which no budget counts.
    """
    asked = "an unknown number of bytes" if failure.requested_bytes is None else format_size(failure.requested_bytes)
    return f"{asked} asked for, {format_size(max(failure.held_bytes - held_before, 0))} held"


def allocator_retries(device: torch.device) -> int:
    """Times that a card's allocator had to give its cache back to serve a request."""
    if device.type != "cuda":
        return 0
    return int(torch.cuda.memory_stats_as_nested_dict(device).get("num_alloc_retries", 0))
