"""Checkpoints that a script writes and reads. Fake tensors have no bytes, so the file holds a short key instead.

The key is copied, renamed and read like any other content; the tensors' shapes and types are kept by key.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor

from memfit.device.virtual.hybrid_mode import HybridMode
from memfit.device.virtual.patching import replaced
from memfit.script.saved_content import SavedContent, SavedTensor
from memfit.script.step_watch import StepWatch
from memfit.torch_compat import (
    DisableTorchDispatch,
    DisableTorchFunction,
    FakeTensor,
    disable_current_modes,
    tree_flatten,
    tree_unflatten,
)
from memfit.torch_compat.attributes import storage_id_of

_MARK = b"memfit traced checkpoint "
_LENGTH = len(_MARK) + 8


class SavedFiles:
    """The files that the script saved in this run.

    Args:
        may_write: whether a file is made; without a sandbox none is, because it would replace a real checkpoint.
        made_on_cpu: called with each tensor that was read from a file and stays on the CPU.
    """

    def __init__(self, mode: HybridMode, made_on_cpu: Callable[[Tensor], None], *, may_write: bool) -> None:
        self._mode, self.made_on_cpu, self.may_write = mode, made_on_cpu, may_write
        self._saved: list[SavedContent] = []
        self._by_path: dict[str, int] = {}

    def write(self, target: Any, content: Any) -> None:
        """Keeps the content's shapes, and writes their key."""
        self._saved.append(SavedContent.of(content))
        mark = _MARK + f"{len(self._saved) - 1:08d}".encode()
        if hasattr(target, "write"):
            target.write(mark)
        elif self.may_write:
            with open(target, "wb") as opened:
                opened.write(mark)
        else:
            self._by_path[os.path.realpath(target)] = len(self._saved) - 1

    def holds(self, source: Any) -> int | None:
        """The key of what was saved there in this run; None for any other file."""
        head = b""
        with contextlib.suppress(OSError, ValueError):
            if hasattr(source, "read"):
                place = source.tell()
                head = source.read(_LENGTH)
                source.seek(place)
            else:
                if os.path.realpath(source) in self._by_path:
                    return self._by_path[os.path.realpath(source)]
                with open(source, "rb") as opened:
                    head = opened.read(_LENGTH)
        return int(head[len(_MARK) :]) if isinstance(head, bytes) and head.startswith(_MARK) else None

    def read(self, number: int, where: str | None) -> Any:
        """Returns the saved content on the card or the CPU; ``where`` None keeps each tensor's device."""
        made: dict[int, Tensor] = {}
        return self._saved[number].read(lambda saved: self._made(saved, where, made))

    def _made(self, saved: SavedTensor, where: str | None, made: dict[int, Tensor]) -> Tensor:
        tensor = self._of_content(saved.content, where) if saved.content is not None else self._fake(saved, where, made)
        return tensor if saved.requires_grad is None else torch.nn.Parameter(tensor, saved.requires_grad)

    def _of_content(self, content: Tensor, where: str | None) -> Tensor:
        return content.clone() if where in (None, "cpu") else content.to(where)

    def _fake(self, saved: SavedTensor, where: str | None, made: dict[int, Tensor]) -> Tensor:
        """A fake tensor; tensors of one storage and shape are one."""
        if saved.storage in made and made[saved.storage].shape == saved.shape:
            return made[saved.storage]
        place = ("cuda" if saved.on_card else "cpu") if where is None else where
        if place == "cpu":
            with DisableTorchDispatch():
                model = torch.empty(saved.shape, dtype=saved.dtype, device="meta")
                fake = self._mode.new(model, torch.device("cpu"))
            self.made_on_cpu(fake)
            tensor: Tensor = fake
        else:
            tensor = torch.empty(saved.shape, dtype=saved.dtype, device=place)
        return made.setdefault(saved.storage, tensor)


@contextmanager
def checkpoints(watch: StepWatch, files: SavedFiles) -> Iterator[None]:
    """Context in which saving is a phase and writes no tensors; loading reads real files onto the requested device."""

    def save(content: Any, f: Any, *args: Any, **kwargs: Any) -> None:
        with watch.saving():
            files.write(f, content)

    def save_file(tensors: Any, filename: Any, *args: Any, **kwargs: Any) -> None:
        save(tensors, filename)

    def save_model(model: Any, filename: Any, *args: Any, **kwargs: Any) -> None:
        save(model.state_dict(), filename)

    def save_shards(state_dict: Any, *args: Any, checkpoint_id: Any = None, **kwargs: Any) -> None:
        """Replaces torch.distributed.checkpoint.save: saves this rank's part, in a folder."""
        with watch.saving():
            if checkpoint_id is not None and files.may_write:
                os.makedirs(checkpoint_id, exist_ok=True)
                files.write(os.path.join(checkpoint_id, "__0_0.distcp"), state_dict)

    def save_shards_later(state_dict: Any, *args: Any, **kwargs: Any) -> Future[None]:
        save_shards(state_dict, *args, **kwargs)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    import safetensors.torch
    import torch.distributed.checkpoint as sharded

    with ExitStack() as stack:
        stack.enter_context(replaced(torch, save=save, load=_loaded(torch.load, files)))
        stack.enter_context(replaced(torch.serialization, save=save))
        stack.enter_context(
            replaced(sharded, save=save_shards, async_save=save_shards_later, load=lambda *args, **kwargs: None)
        )
        read = _read_safetensors(safetensors.torch.load_file, files)
        stack.enter_context(replaced(safetensors.torch, save_file=save_file, save_model=save_model, load_file=read))
        stack.enter_context(replaced(FakeTensor, __reduce_ex__=_pickled))
        yield


def _loaded(load: Callable[..., Any], files: SavedFiles) -> Callable[..., Any]:
    def call(f: Any, map_location: Any = None, *args: Any, **kwargs: Any) -> Any:
        number = files.holds(f)
        if number is not None:
            return files.read(number, _location(map_location))
        stays_mapped = bool(kwargs.get("mmap"))
        if isinstance(f, str | os.PathLike) and _is_zip(f):
            kwargs.setdefault("mmap", True)
        saved_on: set[str] = set()

        def note(storage: Any, location: str) -> Any:
            saved_on.add(location.partition(":")[0])
            return storage

        with disable_current_modes(), DisableTorchFunction():
            content = load(f, note if map_location is None else "cpu", *args, **kwargs)
        to_card = "cuda" in saved_on if map_location is None else _location(map_location) == "cuda"
        if to_card:
            return _moved(content)
        for tensor in [] if stays_mapped else _real_tensors(content):
            files.made_on_cpu(tensor)
        return content

    return call


def _real_tensors(content: Any) -> list[Tensor]:
    """The tensors of what was read from a file, one for each storage."""
    leaves = tree_flatten(content)[0]
    tensors = [leaf for leaf in leaves if type(leaf) is Tensor and leaf.layout is torch.strided]
    return list({storage_id_of(tensor): tensor for tensor in tensors}.values())


def _is_zip(file: Any) -> bool:
    """Whether a checkpoint can be memory-mapped."""
    with contextlib.suppress(OSError), open(file, "rb") as opened:
        return opened.read(4) == b"PK\x03\x04"
    return False


def _location(map_location: Any) -> str | None:
    """``cuda`` or ``cpu``; None if no device is given. A function is assumed to map to the CPU, as most do."""
    if isinstance(map_location, dict):
        map_location = next(iter(map_location.values()), None)
    if map_location is None:
        return None
    return "cuda" if "cuda" in str(map_location) else "cpu"


def _moved(content: Any) -> Any:
    """Moves every tensor to the card; tensors that share a storage share it there."""
    leaves, tree = tree_flatten(content)
    moved: dict[tuple[int, torch.dtype], Tensor] = {}
    out = []
    for leaf in leaves:
        if not isinstance(leaf, Tensor) or leaf.layout is not torch.strided:
            out.append(leaf)
            continue
        key = (leaf.untyped_storage().data_ptr(), leaf.dtype)
        if key not in moved:
            elements = leaf.untyped_storage().nbytes() // leaf.itemsize
            moved[key] = torch.as_strided(leaf.detach(), (elements,), (1,), 0).to("cuda")
        view = torch.as_strided(moved[key], leaf.shape, leaf.stride(), leaf.storage_offset())
        out.append(torch.nn.Parameter(view, leaf.requires_grad) if isinstance(leaf, torch.nn.Parameter) else view)
    return tree_unflatten(out, tree)


def _read_safetensors(load_file: Callable[..., Any], files: SavedFiles) -> Callable[..., Any]:
    def call(filename: Any, device: Any = "cpu", *args: Any, **kwargs: Any) -> Any:
        number = files.holds(filename)
        if number is not None:
            return files.read(number, _location(device))
        with disable_current_modes(), DisableTorchFunction():
            content = load_file(filename, "cpu", *args, **kwargs)
        return _moved(content) if _location(device) == "cuda" else content

    return call


def _pickled(self: FakeTensor, protocol: Any) -> Any:
    """Pickles a fake tensor (for another process, or to measure its size) as zeros of its shape and type."""
    return _zeros, (tuple(self.shape), self.dtype)


def _zeros(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return torch.zeros(shape, dtype=dtype)
