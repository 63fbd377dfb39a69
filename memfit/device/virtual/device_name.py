"""What code that is neither torch's nor memfit's sees of the virtual GPU's name: cuda, in devices and in texts."""

from __future__ import annotations

import contextlib
import re
import sys
import warnings
from collections.abc import Iterator
from functools import wraps
from typing import Any, TextIO

import torch

from memfit.device.virtual.assumptions import OURS
from memfit.device.virtual.backend import NAME
from memfit.device.virtual.patching import replaced

_NAMED = re.compile(rf"\b{NAME}\b")

_users: dict[str, bool] = {}
"""File -> whether its code is told cuda."""


def seen_from(frame: Any) -> bool:
    """Whether this frame is neither torch's nor memfit's."""
    name = frame.f_code.co_filename
    if name not in _users:
        _users[name] = not name.startswith(OURS)
    return _users[name]


def with_cuda(text: str) -> str:
    """A text of torch's as it reads on a card."""
    return _NAMED.sub("cuda", text)


def rename_in(error: BaseException) -> None:
    """Changes the texts that an error carries to those of a card."""
    if any(isinstance(part, str) and NAME in part for part in error.args):
        error.args = tuple(with_cuda(part) if isinstance(part, str) else part for part in error.args)


@contextlib.contextmanager
def named_cuda() -> Iterator[None]:
    """A context in which warnings, the default device and the accelerator are named as on a card."""
    shown, accelerator, default = warnings.showwarning, torch.accelerator.current_accelerator, torch.get_default_device

    def show(
        message: Warning | str, category: type[Warning], filename: str, lineno: int, file: TextIO | None = None,
        line: str | None = None,
    ) -> None:  # fmt: skip
        if isinstance(message, Warning):
            rename_in(message)
        shown(message, category, filename, lineno, file, line)

    @wraps(accelerator)
    def current_accelerator(*args: Any, **kwargs: Any) -> torch.device | None:
        device = accelerator(*args, **kwargs)
        on_card = device is not None and device.type == NAME
        return torch.device("cuda") if on_card and seen_from(sys._getframe(1)) else device

    @wraps(default)
    def get_default_device() -> torch.device:
        device = default()
        return torch.device("cuda", 0) if device.type == NAME and seen_from(sys._getframe(1)) else device

    with (
        replaced(warnings, showwarning=show),
        replaced(torch.accelerator, current_accelerator=current_accelerator),
        replaced(torch, get_default_device=get_default_device),
    ):
        yield
