"""Autograd's threads: a process that has some cannot run a backward in a copy of itself that is made later.

Its engine starts one for each device that torch knows at the first backward of a process, and a process with such
threads refuses backwards in its forked copies (``Engine::start_device_threads`` in torch's autograd/engine.cpp).
"""

from __future__ import annotations

import os
from contextlib import suppress

import torch

from memfit.torch_compat.backend import NAME


def backward_without_threads() -> bool:
    """Has backwards of this process, and of its copies, run in the thread that asks for them, where that leaves no
    thread of autograd's. To be called before the first backward and before the virtual card is there.

    Returns:
        Whether it does: not where this machine has an accelerator, whose threads the engine starts, nor where the
        virtual card is registered; nor where threads cannot be counted.
    """
    if hasattr(torch, NAME) or _has_accelerator() or (before := _threads()) is None:
        return False
    torch.ones((), requires_grad=True).backward()
    if _threads() != before:
        return False
    torch.autograd.set_multithreading_enabled(False)
    return True


def _has_accelerator() -> bool:
    accelerator = getattr(torch, "accelerator", torch.cuda)  # since torch 2.6
    return bool(accelerator.is_available())


def _threads() -> int | None:
    with suppress(OSError):
        return len(os.listdir("/proc/self/task"))
    return None
