"""Checkpoints that the script writes and reads: fake tensors have no bytes, so neither has the file."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_flatten, tree_map_only, tree_unflatten

from memfit.device.virtual.patching import replaced
from memfit.script.step_watch import StepWatch


class SavedFiles:
    """What the script saved in this run: reading such a file gives back the very objects, copied."""

    def __init__(self, *, may_touch: bool) -> None:
        self.saved: dict[str, Any] = {}
        self._may_touch = may_touch

    def write(self, path: Any, content: Any) -> None:
        """Keeps the content, and makes an empty file where the sandbox throws it away."""
        if not isinstance(path, str | os.PathLike):
            return
        name = os.path.realpath(path)
        self.saved[name] = content
        if self._may_touch:
            with open(name, "wb"):
                pass

    def read(self, path: Any) -> Any:
        """What was written there in this run.

        Raises:
            KeyError: nothing was.
        """
        return self.saved[os.path.realpath(path)] if isinstance(path, str | os.PathLike) else self.saved[""]


@contextmanager
def checkpoints(watch: StepWatch, files: SavedFiles) -> Iterator[None]:
    """Inside, saving is a phase and writes no bytes; loading reads real files, onto the device that was asked for."""

    def save(content: Any, path: Any, *args: Any, **kwargs: Any) -> None:
        with watch.saving():
            files.write(path, content)

    def save_model(model: Any, path: Any, *args: Any, **kwargs: Any) -> None:
        with watch.saving():
            files.write(path, model.state_dict())

    with ExitStack() as stack:
        stack.enter_context(replaced(torch, save=save, load=_loaded(torch.load, files)))
        stack.enter_context(replaced(torch.serialization, save=save))
        import safetensors.torch

        writers: dict[str, Callable[..., Any]] = {"save_file": save, "save_model": save_model}
        readers = {"load_file": _read_safetensors(safetensors.torch.load_file, files)}
        stack.enter_context(replaced(safetensors.torch, **writers, **readers))
        stack.enter_context(replaced(FakeTensor, __reduce_ex__=_pickled, __copy__=_copied))
        yield


def _loaded(load: Callable[..., Any], files: SavedFiles) -> Callable[..., Any]:
    def call(file: Any, map_location: Any = None, *args: Any, **kwargs: Any) -> Any:
        with contextlib.suppress(KeyError):
            return _copies(files.read(file))
        if isinstance(file, str | os.PathLike):
            kwargs.setdefault("mmap", _is_zip(file))
        with _disable_current_modes(), torch._C.DisableTorchFunction():
            found = load(file, "cpu", *args, **kwargs)
        where = _location(map_location)
        return found if where is None else _moved(found, where)

    return call


def _is_zip(file: Any) -> bool:
    """Whether a checkpoint has the form that can be mapped instead of read."""
    with contextlib.suppress(OSError), open(file, "rb") as opened:
        return opened.read(4) == b"PK\x03\x04"
    return False


def _location(map_location: Any) -> str | None:
    """The card, where ``map_location`` says so. Without one, a checkpoint goes back to where it came from: the card
    is assumed only where it is said."""
    if isinstance(map_location, dict):
        map_location = next(iter(map_location.values()), None)
    return "cuda" if "cuda" in str(map_location) else None


def _moved(found: Any, where: str) -> Any:
    """Every tensor on the card; tensors that share a storage share it there."""
    leaves, tree = tree_flatten(found)
    moved: dict[int, Tensor] = {}
    out = []
    for leaf in leaves:
        if not isinstance(leaf, Tensor) or leaf.layout is not torch.strided:
            out.append(leaf)
            continue
        key = leaf.untyped_storage().data_ptr()
        if key not in moved:
            elements = leaf.untyped_storage().nbytes() // leaf.itemsize
            with torch.no_grad():
                moved[key] = torch.as_strided(leaf.detach(), (elements,), (1,), 0).to(where)
        base = moved[key]
        if base.dtype != leaf.dtype:
            base = leaf.detach().to(where)
            out.append(base)
            continue
        view = torch.as_strided(base, leaf.shape, leaf.stride(), leaf.storage_offset())
        out.append(torch.nn.Parameter(view, leaf.requires_grad) if isinstance(leaf, torch.nn.Parameter) else view)
    return tree_unflatten(out, tree)


def _read_safetensors(load_file: Callable[..., Any], files: SavedFiles) -> Callable[..., Any]:
    def call(path: Any, device: Any = "cpu", *args: Any, **kwargs: Any) -> Any:
        with contextlib.suppress(KeyError):
            return _copies(files.read(path))
        with _disable_current_modes(), torch._C.DisableTorchFunction():
            found = load_file(path, "cpu", *args, **kwargs)
        where = _location(device)
        return found if where is None else _moved(found, where)

    return call


def _copies(content: Any) -> Any:
    """As a file would give it: other tensors of the same content."""
    return tree_map_only(Tensor, lambda tensor: tensor.detach().clone(), content)


def _pickled(self: FakeTensor, protocol: Any) -> Any:
    """A fake tensor passes through pickle (to another process, or to be measured) as zeros of its shape and type."""
    return _zeros, (tuple(self.shape), self.dtype)


def _zeros(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return torch.zeros(shape, dtype=dtype)


def _copied(self: FakeTensor) -> Tensor:
    """``copy.copy`` of a tensor is another tensor over the same storage."""
    return self.view_as(self).requires_grad_(self.requires_grad) if not self.requires_grad else self
