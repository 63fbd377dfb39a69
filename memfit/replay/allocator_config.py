"""AllocatorConfig: the settings of PyTorch's CUDA caching allocator, as PYTORCH_CUDA_ALLOC_CONF writes them, and what
differs between versions.

Source: c10/core/AllocatorConfig.{h,cpp} of torch 2.13.0; tests/replay/test_config.py compares with the installed torch.
Settings that do not change the bytes reserved on the card (pinned host memory, locking, IPC) are read and passed by.
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass, field, replace
from functools import cache

from memfit.errors import InputError
from memfit.installation import release_number, version_of

MIB = 1 << 20
MIN_LARGE_MIB = 10
"""A large_segment_size_mb must exceed it: requests from 10 MiB on get a segment of their own."""
CLASSES = 16
"""Size classes of roundup_power2_divisions: below 2 MiB, from 2 MiB, from 4 MiB ... from 32 GiB."""

_IGNORED = frozenset({
    "backend", "release_lock_on_cudamalloc", "pinned_use_cuda_host_register", "pinned_num_register_threads",
    "pinned_reserve_segment_size_mb", "pinned_use_background_threads", "pinned_max_round_threshold_mb",
    "pinned_max_cached_size_mb", "pinned_free_catch_all", "graph_capture_record_stream_reuse",
    "throw_on_cudamalloc_oom",
})  # fmt: skip
_READ = (
    "expandable_segments", "max_split_size_mb", "max_non_split_rounding_mb", "large_segment_size_mb",
    "garbage_collection_threshold", "roundup_power2_divisions", "per_process_memory_fraction",
)  # fmt: skip


OLDEST_FIRST = (2, 12)
"""The first minor version of torch whose allocator orders blocks of one size by age (pytorch/pytorch pull request
178362; from 2.13 on by the age of their segments, 183591). Earlier ones order them by address."""


def takes_youngest(torch_version: str) -> bool:
    """Whether this version of torch takes, of free blocks of one size, the one in the youngest segment.

    Up to 2.11 it takes the lowest address, and the driver places each segment below the ones before. From 2.13 on it
    takes the oldest segment. 2.12 takes the block that was split off first, which is not modelled: it counts as 2.13.
    """
    return (0, 0) < release_number(torch_version) < OLDEST_FIRST


@cache
def _installed_takes_youngest() -> bool:
    return takes_youngest(version_of("torch"))


@dataclass(frozen=True, kw_only=True)
class AllocatorConfig:
    """Settings of the CUDA caching allocator that change what is reserved; sizes in bytes."""

    expandable_segments: bool = False
    """One growing address range for each pool and stream, mapped page by page."""
    max_split_size: int | None = None
    """Blocks of this size and more are not split (None: every block may be)."""
    max_non_split_rounding: int = 20 * MIB
    """A request of max_split_size or more takes a free block that is larger by less than this."""
    large_segment_size: int = 20 * MIB
    """What is reserved for a request of more than 1 MiB and less than 10 MiB."""
    garbage_collection_threshold: float = 0.0
    """Fraction of the allowed bytes past which old free segments go back (0: off). PyTorch heeds it only together with
    a memory fraction below 1."""
    roundup_power2_divisions: tuple[int, ...] = (0,) * CLASSES
    """Steps between two powers of two to which a request is rounded up, for each of the CLASSES (0 and 1: off)."""
    per_process_memory_fraction: float = 1.0
    """The part of the card's total memory that may be reserved (1: no limit but the card's)."""
    youngest_first: bool = field(default_factory=_installed_takes_youngest)
    """No setting but a rule of the version, ``takes_youngest``; default: the installed torch's."""

    @classmethod
    def parse(cls, text: str) -> AllocatorConfig:
        """Reads ``key:value,key:value`` as PYTORCH_CUDA_ALLOC_CONF is written.

        Raises:
            InputError: an unknown key, or a value that PyTorch refuses.
        """
        given = dict(_pairs(text))
        config = cls()
        if "large_segment_size_mb" in given:
            size = _mib("large_segment_size_mb", given["large_segment_size_mb"], least=MIN_LARGE_MIB + 1)
            config = replace(config, large_segment_size=size, max_non_split_rounding=size)
        least = config.large_segment_size // MIB
        if "max_split_size_mb" in given:
            config = replace(config, max_split_size=_mib("max_split_size_mb", given["max_split_size_mb"], least=least))
        if "max_non_split_rounding_mb" in given:
            rounding = _mib("max_non_split_rounding_mb", given["max_non_split_rounding_mb"], least=least)
            config = replace(config, max_non_split_rounding=rounding)
        if "garbage_collection_threshold" in given:
            config = replace(config, garbage_collection_threshold=_fraction(given, "garbage_collection_threshold", 0.8))
        if "per_process_memory_fraction" in given:
            config = replace(config, per_process_memory_fraction=_fraction(given, "per_process_memory_fraction", 0.9))
        if "expandable_segments" in given:
            config = replace(config, expandable_segments=_true_or_false(given["expandable_segments"]))
        if "roundup_power2_divisions" in given:
            config = replace(config, roundup_power2_divisions=_divisions(given["roundup_power2_divisions"]))
        return config

    def allowed_bytes(self, total_memory: int) -> int | None:
        """The bytes that may be reserved under per_process_memory_fraction of a card's total memory; None: no limit."""
        fraction = self.per_process_memory_fraction
        return int(fraction * total_memory) if fraction < 1 else None


def _pairs(text: str) -> list[tuple[str, str]]:
    """(key, value) in order; commas inside brackets belong to the value."""
    parts, depth, start = [], 0, 0
    text = "".join(text.split())
    for at, letter in enumerate(text):
        depth += (letter == "[") - (letter == "]")
        if letter == "," and depth == 0:
            parts.append(text[start:at])
            start = at + 1
    parts.append(text[start:])
    pairs = []
    for part in filter(None, parts):
        key, colon, value = part.partition(":")
        if not colon or not value:
            raise InputError(f"allocator setting {part!r}", "a key without a value", f"write {key}:VALUE")
        if key not in _READ and key not in _IGNORED:
            near = difflib.get_close_matches(key, (*_READ, *_IGNORED), n=1, cutoff=0)[0]
            raise InputError(f"allocator setting {key!r}", "PyTorch's CUDA allocator has no such key", f"write {near}")
        pairs.append((key, value))
    return pairs


def _mib(key: str, value: str, *, least: int) -> int:
    if not value.isdecimal() or int(value) < least:
        raise InputError(f"{key}:{value}", f"not a whole number of MiB from {least} on", f"write {key}:{least} or more")
    return int(value) * MIB


def _fraction(given: dict[str, str], key: str, example: float) -> float:
    try:
        value = float(given[key])
    except ValueError:
        value = -1.0
    if not (0 < value < 1 or (value == 1 and key == "per_process_memory_fraction")):
        raise InputError(f"{key}:{given[key]}", "a fraction between 0 and 1 is needed", f"write {key}:{example}")
    return value


def _true_or_false(value: str) -> bool:
    if value not in ("True", "False"):
        raise InputError(
            f"expandable_segments:{value}", "PyTorch knows only True and False here", "write True or False"
        )
    return value == "True"


def _divisions(value: str) -> tuple[int, ...]:
    """The division of each size class. As PyTorch does, a class between two that were named stays off."""
    key = "roundup_power2_divisions"
    if not value.startswith("["):
        return (_power_of_two(key, value, value),) * CLASSES
    if not value.endswith("]"):
        raise InputError(f"{key}:{value}", "the bracket is not closed", f"write {key}:[256:1,512:2,>:8]")
    classes, last, first = [0] * CLASSES, 0, True
    for entry in value[1:-1].split(","):
        boundary, _, number = entry.partition(":")
        division = 0 if number == "0" else _power_of_two(key, number, entry)
        if boundary == ">":
            classes[last + 1 :] = [division] * (CLASSES - last - 1)
            continue
        last = min(_power_of_two(key, boundary, entry).bit_length() - 1, CLASSES - 1)
        if first:
            classes[:last] = [division] * last
            first = False
        classes[last] = division
    return tuple(classes)


def _power_of_two(key: str, number: str, entry: str) -> int:
    if not number.isdecimal() or int(number).bit_count() != 1:
        raise InputError(f"{key}: {entry!r}", "boundaries and divisions are powers of two", f"write {key}:[256:1,>:8]")
    return int(number)
