"""The device type "vgpu": PyTorch's PrivateUse1 backend under a name of ours, registered once per process.

Registering cannot be undone, and harms nothing: no tensor has this device outside of ``virtual_gpu``.
"""

from __future__ import annotations

import contextlib
from functools import cache
from types import SimpleNamespace
from typing import Any

import torch

NAME = "vgpu"


class Stream(contextlib.AbstractContextManager[None]):
    """A stream that does everything at once. Overlap is not modelled."""

    device = torch.device("cpu")
    stream_id = 0

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
    def __exit__(self, *error: Any) -> None: ...
    def wait_stream(self, stream: Any) -> None: ...
    def wait_event(self, event: Any) -> None: ...
    def synchronize(self) -> None: ...

    def record_event(self, event: Event | None = None) -> Event:
        return event or Event()

    def query(self) -> bool:
        return True


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


def _nothing(*args: Any, **kwargs: Any) -> None: ...


def _module() -> SimpleNamespace:
    """What torch asks of ``torch.vgpu``: random state, streams (FSDP2), autocast's types."""
    stream = Stream()
    return SimpleNamespace(
        is_initialized=lambda: True,
        is_available=lambda: True,
        current_device=lambda: 0,
        device_count=lambda: 1,
        _is_in_bad_fork=lambda: False,
        manual_seed=_nothing,
        manual_seed_all=_nothing,
        get_amp_supported_dtype=lambda: [torch.float16, torch.bfloat16],
        Stream=Stream,
        Event=Event,
        current_stream=lambda device=None: stream,
        default_stream=lambda device=None: stream,
        stream=lambda stream: contextlib.nullcontext(),
        device=lambda device: contextlib.nullcontext(),
        set_device=_nothing,
        set_stream=_nothing,
        synchronize=_nothing,
        empty_cache=_nothing,
        get_rng_state=lambda device=None: torch.empty(16, dtype=torch.uint8, device="cpu"),
        set_rng_state=_nothing,
    )


@cache
def register() -> None:
    """Names PrivateUse1 ``vgpu``; the second call does nothing."""
    from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

    _setup_privateuseone_for_python_backend(NAME, backend_module=_module())
