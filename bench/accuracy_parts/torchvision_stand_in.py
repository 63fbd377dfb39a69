"""What timm imports of torchvision, where torchvision is not installed: names only, apart from a batch norm.

torchvision has no build for a CPU-only torch. timm's nets use none of it but FrozenBatchNorm2d, as a type to compare
with; its data sets and transforms are imported and, for synthetic images, never called.
"""

from __future__ import annotations

import enum
import importlib.machinery
import importlib.util
import sys
from types import ModuleType
from typing import Any

from torch import nn


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


def install() -> None:
    """Puts the stand-in in ``sys.modules``, unless torchvision is installed."""
    if "torchvision" in sys.modules or importlib.util.find_spec("torchvision") is not None:
        return
    for path in ("", ".datasets", ".ops", ".ops.misc", ".transforms", ".transforms.functional", ".utils"):
        module = _Named(f"torchvision{path}")
        module.__spec__ = importlib.machinery.ModuleSpec(module.__name__, None, is_package=True)
        module.__path__ = []
        sys.modules[module.__name__] = module
        parent, _, child = module.__name__.rpartition(".")
        if parent:
            setattr(sys.modules[parent], child, module)
    sys.modules["torchvision.ops.misc"].FrozenBatchNorm2d = FrozenBatchNorm2d  # type: ignore[attr-defined]
    for path in ("torchvision.transforms", "torchvision.transforms.functional"):
        sys.modules[path].InterpolationMode = InterpolationMode  # type: ignore[attr-defined]
