"""The device type "vgpu": PyTorch's PrivateUse1 backend under a name of ours, registered once per process.

Registering cannot be undone. Outside of ``entered`` the device says that it is not available, so that real training in
the same process goes on as before: pinning memory, say. With a CUDA build of torch PrivateUse1 takes CUDA's place as
the process's accelerator for good: there, trace in a process of its own (never tried).
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from functools import cache
from types import SimpleNamespace
from typing import Any

import torch

from memfit.torch_compat import backend as torch_backend

NAME = torch_backend.NAME


class Stream(contextlib.AbstractContextManager[None]):
    """A stream that does everything at once, in a pool of its own (a card's allocator has one for each stream)."""

    device = torch.device("cpu")
    device_index = 0
    device_type = 0

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.stream_id = next(_numbers)
        self._before: list[Stream] = []

    def __enter__(self) -> None:
        self._before.append(_current[0])
        _current[0] = self

    def __exit__(self, *error: Any) -> None:
        _current[0] = self._before.pop()

    def wait_stream(self, stream: Any) -> None: ...
    def wait_event(self, event: Any) -> None: ...
    def synchronize(self) -> None: ...

    def record_event(self, event: Event | None = None) -> Event:
        return event or Event()

    def query(self) -> bool:
        return True

    def is_capturing(self) -> bool:
        """Whether a CUDA graph is recorded here, which FSDP2 asks from torch 2.15 on."""
        return False


_numbers = itertools.count()
_default = Stream()
_current = [_default]


def current_stream(device: Any = None) -> Stream:
    """The stream that memory is asked for on."""
    return _current[0]


def default_stream(device: Any = None) -> Stream:
    """The stream of code that names none."""
    return _default


def set_stream(stream: Stream | None) -> None:
    """Makes a stream the current one."""
    if stream is not None:
        _current[0] = stream


def on_stream(stream: Stream | None) -> contextlib.AbstractContextManager[None]:
    """A context in which memory is allocated on this stream; None: on the current one."""
    return contextlib.nullcontext() if stream is None else stream


class Event:
    """An event that has always happened."""

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
    def record(self, stream: Any = None) -> None: ...
    def wait(self, stream: Any = None) -> None: ...
    def synchronize(self) -> None: ...

    def query(self) -> bool:
        return True

    def elapsed_time(self, end: Any) -> float:
        """Milliseconds: a trace takes no time on its device."""
        return 0.0


_inside = 0
"""Contexts of the virtual GPU that are entered now."""


def is_inside() -> bool:
    """Whether a virtual GPU is entered now."""
    return _inside > 0


@contextlib.contextmanager
def entered() -> Iterator[None]:
    """A context in which the device is available."""
    global _inside, _numbers
    _inside += 1
    _numbers = itertools.count(1)
    try:
        with torch_backend.engine_replaced(torch_backend.run_backward_on_device):
            yield
    finally:
        _inside -= 1
        _current[0] = _default


_DTYPES = [value for value in vars(torch).values() if isinstance(value, torch.dtype)]


def _nothing(*args: Any, **kwargs: Any) -> None: ...


def _module() -> SimpleNamespace:
    """What torch asks of ``torch.vgpu``: random state, streams (FSDP2), autocast's types."""
    return SimpleNamespace(
        is_initialized=lambda: True,
        is_available=is_inside,
        current_device=lambda: 0,
        device_count=lambda: int(is_inside()),
        _is_in_bad_fork=lambda: False,
        manual_seed=_nothing,
        manual_seed_all=_nothing,
        get_amp_supported_dtype=lambda: _DTYPES,  # CUDA's autocast takes any
        Stream=Stream,
        Event=Event,
        current_stream=current_stream,
        default_stream=default_stream,
        stream=on_stream,
        device=lambda device: contextlib.nullcontext(),
        set_device=_nothing,
        set_stream=set_stream,
        synchronize=_nothing,
        empty_cache=_nothing,
        get_rng_state=lambda device=None: torch.empty(16, dtype=torch.uint8, device="cpu"),
        set_rng_state=_nothing,
    )


@cache
def register_virtual_device() -> None:
    """Names PrivateUse1 ``vgpu``; the second call does nothing."""
    torch_backend.register_backend(_module(), is_inside)
