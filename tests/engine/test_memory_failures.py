"""What counts as memory that ran out.

python -m pytest tests/engine/test_memory_failures.py
"""

import pytest
import torch

from memfit.engine.collectives import is_memory_failure


def message_of_the_allocator():
    with pytest.raises(RuntimeError) as failed:
        torch.empty(1 << 60, dtype=torch.uint8)
    return str(failed.value)


@pytest.mark.parametrize("length", [15, 30, 60, None])
def test_a_message_for_which_there_was_too_little_memory_counts_too(length):
    """The C++ library cuts a text off where its next buffer cannot be made."""
    assert is_memory_failure(RuntimeError(message_of_the_allocator()[:length]))


@pytest.mark.parametrize(
    "message",
    [
        "[enforce fail at inline_container.cc:745] . PytorchStreamReader failed reading file",
        "[enforce fail at alloc_cpu.cpp:112] ((ptrdiff_t)nbytes) >= 0. alloc_cpu() seems to have been called with",
        "[enforce fail at",
        "[enforce fail b",
        "[enforce fail at inline_contain",
        "",
    ],
)
def test_another_failure_does_not(message):
    assert not is_memory_failure(RuntimeError(message))
    assert not is_memory_failure(RuntimeError(message[:60]))


@pytest.mark.parametrize(
    "error",
    [
        SystemError("error return without exception set"),
        SystemError("<built-in method clone of Tensor object at 0x7f> returned NULL without setting an exception"),
        MemoryError(),
        OSError(12, "Cannot allocate memory"),
    ],
)
def test_an_error_in_the_place_of_one_that_python_lost_counts(error):
    assert is_memory_failure(error)
    assert not is_memory_failure(SystemError("bad argument to internal function"))
    assert not is_memory_failure(OSError(28, "No space left on device"))
