"""What timm imports of torchvision, where torchvision is not installed: names only, apart from a batch norm.

torchvision has no build for a CPU-only torch. timm's nets use none of it but FrozenBatchNorm2d, as a type to compare
with; its data sets and transforms are imported and, for synthetic images, never called.
"""

from __future__ import annotations

import contextlib
import enum
import importlib.machinery
import importlib.util
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

from torch import nn

_PATHS = ("", ".datasets", ".ops", ".ops.misc", ".transforms", ".transforms.functional", ".utils")


class InterpolationMode(enum.Enum):
    """torchvision.transforms.InterpolationMode."""

    NEAREST = "nearest"
    NEAREST_EXACT = "nearest-exact"
    BILINEAR = "bilinear"
    BICUBIC = "bicubic"
    BOX = "box"
    HAMMING = "hamming"
    LANCZOS = "lanczos"


class FrozenBatchNorm2d(nn.Module):
    """Only a type: no net of timm is built with it unless its layers are frozen afterwards."""


class _Named(ModuleType):
    """A module any of whose names is a class that cannot be made."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)

        def refuse(self: Any, *args: Any, **kwargs: Any) -> None:
            raise RuntimeError(f"torchvision's {name} is not here: this is the stand-in of memfit's benchmark")

        made = type(name, (), {"__init__": refuse})
        setattr(self, name, made)
        return made


@contextlib.contextmanager
def present() -> Iterator[None]:
    """The stand-in is in ``sys.modules`` inside, unless torchvision is installed: import timm there. It does not stay,
    since diffusers and Transformers would take it for torchvision."""
    if "torchvision" in sys.modules or importlib.util.find_spec("torchvision") is not None:
        yield
        return
    names = [f"torchvision{path}" for path in _PATHS]
    for name in names:
        module = _Named(name)
        module.__spec__ = importlib.machinery.ModuleSpec(name, None, is_package=True)
        module.__path__ = []
        sys.modules[name] = module
        parent, _, child = name.rpartition(".")
        if parent:
            setattr(sys.modules[parent], child, module)
    sys.modules["torchvision.ops.misc"].FrozenBatchNorm2d = FrozenBatchNorm2d  # type: ignore[attr-defined]
    for name in ("torchvision.transforms", "torchvision.transforms.functional"):
        sys.modules[name].InterpolationMode = InterpolationMode  # type: ignore[attr-defined]
    try:
        yield
    finally:
        for name in names:
            del sys.modules[name]
