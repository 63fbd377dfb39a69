"""Settings of the caching allocator, and that they are read as the installed torch reads them."""

import ctypes
import json
import os
import subprocess
import sys

import pytest

from memfit.errors import InputError
from memfit.replay.allocator_config import CLASSES, MIB, AllocatorConfig

ORACLE = """
import ctypes, json, os, sys, torch
library = ctypes.CDLL(os.path.join(os.path.dirname(torch.__file__), "lib", "libc10.so"))
try:
    torch._C._accelerator_setAllocatorSettings("large_segment_size_mb:20")
    library._ZN3c1016CachingAllocator26AcceleratorAllocatorConfig24roundup_power2_divisionsEm
except (AttributeError, RuntimeError, ValueError):
    sys.exit(print("null"))
divisions = library._ZN3c1016CachingAllocator26AcceleratorAllocatorConfig24roundup_power2_divisionsEm
divisions.restype, divisions.argtypes = ctypes.c_size_t, [ctypes.c_size_t]
answers = {}
for text in json.loads(sys.argv[1]):
    try:
        torch._C._accelerator_setAllocatorSettings("large_segment_size_mb:20")
        torch._C._accelerator_setAllocatorSettings(text)
        answers[text] = [divisions(1 << (20 + k)) for k in range(17)] + [divisions(1 << 9)]
    except Exception:
        answers[text] = None
print(json.dumps(answers))
"""

ACCEPTED = (
    "roundup_power2_divisions:4",
    "roundup_power2_divisions:1",
    "roundup_power2_divisions:[64:8,256:4,1024:4,>:2]",
    "roundup_power2_divisions:[>:4]",
    "roundup_power2_divisions:[1:2,2:4]",
    "roundup_power2_divisions:[256:0,>:16]",
    "roundup_power2_divisions:[131072:8]",
    "max_split_size_mb:20",
    "large_segment_size_mb:11,max_split_size_mb:11",
    " max_split_size_mb : 30 , expandable_segments:True",
    "garbage_collection_threshold:0.5",
    "",
)
REFUSED = (
    "roundup_power2_divisions:3",
    "roundup_power2_divisions:0",
    "roundup_power2_divisions:[3:2]",
    "roundup_power2_divisions:[64:3]",
    "roundup_power2_divisions:[64:8",
    "max_split_size_mb:19",
    "max_split_size_mb:x",
    "max_split_size_mb",
    "large_segment_size_mb:10",
    "max_split_size_mb:30,large_segment_size_mb:40",
    "large_segment_size_mb:40,max_non_split_rounding_mb:30",
    "garbage_collection_threshold:1.0",
    "garbage_collection_threshold:0",
    "expandable_segments:true",
)


@pytest.fixture(scope="module")
def torch_reads() -> dict[str, list[int] | None]:
    """What the installed torch makes of each text: divisions by size class, or None where it refuses."""
    run = subprocess.run(
        [sys.executable, "-c", ORACLE, json.dumps(ACCEPTED + REFUSED)],
        capture_output=True, text=True, check=True, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    answers: dict[str, list[int] | None] | None = json.loads(run.stdout)
    if answers is None:
        pytest.skip("torch before 2.10 reads these settings in its CUDA library, and knows fewer")
    return answers


@pytest.mark.parametrize("text", ACCEPTED)
def test_divisions_are_those_of_the_installed_torch(text: str, torch_reads: dict[str, list[int] | None]) -> None:
    ours = AllocatorConfig.parse(text).roundup_power2_divisions
    assert torch_reads[text] == [ours[min(k, CLASSES - 1)] for k in range(17)] + [ours[0]]


@pytest.mark.parametrize("text", REFUSED)
def test_what_torch_refuses_is_refused_with_a_line_that_teaches(
    text: str, torch_reads: dict[str, list[int] | None]
) -> None:
    assert torch_reads[text] is None
    with pytest.raises(InputError, match="write "):
        AllocatorConfig.parse(text)


def test_sizes_are_read_in_mib() -> None:
    config = AllocatorConfig.parse("max_split_size_mb:128,max_non_split_rounding_mb:64,large_segment_size_mb:32")
    assert (config.max_split_size, config.max_non_split_rounding) == (128 * MIB, 64 * MIB)
    assert config.large_segment_size == 32 * MIB


def test_a_larger_large_segment_raises_the_rounding_that_is_allowed() -> None:
    assert AllocatorConfig.parse("large_segment_size_mb:40").max_non_split_rounding == 40 * MIB


def test_the_order_of_the_keys_does_not_matter() -> None:
    assert AllocatorConfig.parse("max_split_size_mb:40,large_segment_size_mb:40") == AllocatorConfig.parse(
        "large_segment_size_mb:40,max_split_size_mb:40"
    )


def test_settings_that_reserve_nothing_on_the_card_are_passed_by() -> None:
    assert AllocatorConfig.parse("backend:native,pinned_use_background_threads:True") == AllocatorConfig()


def test_an_unknown_key_names_the_nearest_one() -> None:
    with pytest.raises(InputError, match="write max_split_size_mb"):
        AllocatorConfig.parse("max_split_size:128")


def test_a_memory_fraction_is_of_the_whole_card() -> None:
    assert AllocatorConfig.parse("per_process_memory_fraction:0.5").allowed_bytes(25_000_000_001) == 12_500_000_000
    assert AllocatorConfig().allowed_bytes(25_000_000_001) is None
    assert ctypes.c_size_t(int(0.3 * 25_000_000_001)).value == AllocatorConfig.parse(
        "per_process_memory_fraction:0.3"
    ).allowed_bytes(25_000_000_001)
