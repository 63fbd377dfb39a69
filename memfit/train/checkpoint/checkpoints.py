"""RUN/checkpoints: a folder for each saved window, complete or absent, and the newest complete one.

    checkpoints/00000012/state.safetensors   every tensor
                         plan.toml           the plan that was run
                         manifest.json       the rest of the state, and checksums of all three files

A checkpoint is written into a temporary folder, synced, and renamed. Torn and foreign ones are named and passed over.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from memfit.atomic_file import sync
from memfit.errors import InputError, describe
from memfit.plan import Plan, read_plan, write_plan
from memfit.train.checkpoint.state_codec import decode
from memfit.train.checkpoint.tensor_file import (
    BLOCK,
    TensorFile,
    TornError,
    looks_like_pickle,
    open_tensors,
    write_tensors,
)
from memfit.train.checkpoint.unfinished import drop_unfinished

FORMAT = 2
MANIFEST, TENSORS, PLAN, PARTS = "manifest.json", "state.safetensors", "plan.toml", "parts"
_START = '{"crc32":"%08x",'
Say = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """A whole checkpoint, verified, with its tensors in the file."""

    path: Path
    next_window: int
    plan: Plan
    """The plan that was run."""
    state: Mapping[str, Any]
    """As ``memfit.train.checkpoint.state_codec.encode`` gives it."""
    tensors: TensorFile | None
    """None where the state is in parts."""

    @property
    def parts(self) -> Path | None:
        """The folder of parts that ranks wrote (``memfit.train.checkpoint.sharded_checkpoint``); None where one file
        holds the state."""
        return self.path / PARTS if self.tensors is None else None

    def mapped(self, coded: Any) -> Any:
        """A part of the state with tensors that are mapped from the file: to copy from, never to write to."""
        return decode(coded, self._mapped)

    def on(self, device: torch.device) -> Callable[[Any], Any]:
        """Rebuilds a part of the state with tensors of its own, those of an accelerator on ``device``."""

        def build(coded: Any) -> Any:
            made: dict[str, Tensor] = {}

            def tensor(spec: Mapping[str, Any]) -> Tensor:
                key = spec["$tensor"]
                if key not in made:
                    source = self._mapped(spec)
                    where = device if "device" in spec else torch.device("cpu")
                    stride = spec.get("stride")
                    made[key] = (
                        torch.empty_strided(source.shape, stride, dtype=source.dtype, device=where)
                        if stride
                        else torch.empty(source.shape, dtype=source.dtype, device=where)
                    )
                    made[key].copy_(source)
                return made[key]

            return decode(coded, tensor)

        return build

    def _mapped(self, spec: Mapping[str, Any]) -> Tensor:
        assert self.tensors is not None
        dtype = getattr(torch, spec["dtype"]) if "dtype" in spec else None
        return self.tensors.get(spec["$tensor"], dtype, spec.get("shape"))


class Checkpoints:
    """The checkpoints of a run.

    Args:
        path: the folder ``checkpoints``.
        keep: how many whole ones stay.
    """

    def __init__(self, path: Path, keep: int = 2) -> None:
        self.path, self.keep = path, keep

    def numbers(self) -> list[int]:
        """Next windows of what looks like a checkpoint, newest first."""
        entries = self.path.iterdir() if self.path.is_dir() else ()
        return sorted((int(entry.name) for entry in entries if _is_number(entry.name)), reverse=True)

    def folder(self, next_window: int) -> Path:
        """Where the checkpoint with this next window is."""
        return self.path / f"{next_window:08d}"

    def write(
        self,
        next_window: int,
        state: Any,
        tensors: Mapping[str, Tensor],
        plan: Plan,
        lines: Sequence[Path] = (),
        body: Tensor | None = None,
    ) -> None:
        """Writes a checkpoint and drops those past ``keep``.

        Args:
            state, tensors: as ``memfit.train.checkpoint.state_codec.encode`` gives them; the tensors must not change
            meanwhile. lines: files that must be on disk before it, as samples.jsonl.
            body: see ``write_tensors``.

        Raises:
            OSError: it cannot be written; what was there before is untouched.
        """
        unfinished = self.path / f".{next_window:08d}.{os.getpid()}"
        shutil.rmtree(unfinished, ignore_errors=True)
        with self._put_in_place(unfinished, next_window, lines):
            self.path.mkdir(exist_ok=True)  # and not the run's folder: where that was removed, the run ends
            unfinished.mkdir(exist_ok=True)  # where no memory was left to remove it, files are replaced
            sums = write_tensors(unfinished / TENSORS, tensors, body=body)
            file = {"bytes": (unfinished / TENSORS).stat().st_size, "block_bytes": BLOCK, "crc32": sums}
            _write_manifest(unfinished, next_window, plan, {"file": file, "state": state})

    def unfinished(self, next_window: int) -> Path:
        """The folder in which ranks write the parts of a checkpoint, under ``parts``, before it gets its name."""
        return self.path / f".{next_window:08d}.parts"

    def write_parts(self, next_window: int, plan: Plan, lines: Sequence[Path] = ()) -> None:
        """Makes a checkpoint of what all ranks have written into ``unfinished``; rank 0 calls it.

        Raises:
            OSError: it cannot be written; what was there before is untouched.
        """
        unfinished = self.unfinished(next_window)
        with self._put_in_place(unfinished, next_window, lines):
            parts = {}
            for file in sorted((unfinished / PARTS).iterdir()):
                parts[file.name] = {"bytes": file.stat().st_size, "crc32": _sum_of(file)}
                sync(file)
            sync(unfinished / PARTS)
            _write_manifest(unfinished, next_window, plan, {"parts": parts})

    @contextlib.contextmanager
    def received(self, next_window: int) -> Iterator[Path]:
        """A folder into which a whole checkpoint of another node is copied; it has its place afterwards.

        Raises:
            OSError: it cannot be written.
        """
        unfinished = self.path / f".{next_window:08d}.received"
        shutil.rmtree(unfinished, ignore_errors=True)
        with self._put_in_place(unfinished, next_window, ()):
            unfinished.mkdir(parents=True)
            yield unfinished

    @contextlib.contextmanager
    def _put_in_place(self, unfinished: Path, next_window: int, lines: Sequence[Path]) -> Iterator[None]:
        """Around the writing of a checkpoint: synced and renamed to its place, or removed."""
        try:
            yield
            for path in lines:
                if path.exists():
                    sync(path)
            sync(unfinished)
            place = self.folder(next_window)
            self._set_aside(place, ".replaced")
            unfinished.rename(place)
            sync(self.path)
        except BaseException:
            shutil.rmtree(unfinished, ignore_errors=True)
            raise
        with contextlib.suppress(OSError):
            self._drop()

    def newest(self, say: Say) -> Checkpoint | None:
        """The newest whole checkpoint; None where there is none at all.

        Args:
            say: gets a line for each one that is passed over, and for the one that is taken.

        Raises:
            InputError: there are some, and none is whole.
        """
        passed: list[str] = []
        for entry in sorted(self.path.iterdir()) if self.path.is_dir() else ():
            if not entry.name.startswith(".") and not _is_number(entry.name) and entry.suffix != ".torn":
                passed.append(str(_foreign(entry)))
        for number in self.numbers():
            try:
                checkpoint = read_checkpoint(self.folder(number))
            except InputError as error:
                passed.append(str(error))
                continue
            for line in passed:
                say(line)
            if passed:
                say(f"going on from window {checkpoint.next_window}, with {checkpoint.path}, the newest that is whole")
            return checkpoint
        if passed:
            more = f" ({len(passed)} of {len(passed)} are torn or foreign)" if len(passed) > 1 else ""
            why = f"no checkpoint in it is whole{more}: {passed[0].partition(';')[0]}"
            raise InputError(f"checkpoints {self.path}", why, "start a new run in another --out")
        return None

    def clean(self, newest: int) -> None:
        """Drops what a killed process left behind; what claims to be newer than ``newest`` is torn, and set aside."""
        drop_unfinished(self.path)
        for entry in self.path.iterdir() if self.path.is_dir() else ():
            if _is_number(entry.name) and int(entry.name) > newest:
                self._set_aside(entry, ".torn")

    def _drop(self) -> None:
        """A folder that is removed leaves its name first: none is ever found in part."""
        for number in self.numbers()[self.keep :]:
            self._set_aside(self.folder(number), ".old")
        for entry in self.path.glob(".*"):
            if entry.suffix in (".old", ".replaced"):
                shutil.rmtree(entry, ignore_errors=True)

    def _set_aside(self, place: Path, suffix: str) -> None:
        """Renames what is at a place, so that it is never taken for a checkpoint again."""
        if place.exists():
            aside = place.with_name(f"{'' if suffix == '.torn' else '.'}{place.name}{suffix}")
            shutil.rmtree(aside, ignore_errors=True)
            place.rename(aside)


def read_checkpoint(path: Path) -> Checkpoint:
    """A checkpoint, after all of its bytes were checked.

    Raises:
        InputError: it is torn, foreign, or of another version; names it.
    """
    again = "take another checkpoint, or start a new run in another --out"
    if not (path / MANIFEST).is_file():
        raise (
            _foreign(path)
            if path.exists() and not path.is_dir()
            else InputError(f"checkpoint {path}", f"it is torn or no checkpoint: it has no {MANIFEST}", again)
        )
    try:
        manifest = _read_manifest(path / MANIFEST)
        tensors = _tensors(path, manifest)
        if zlib.crc32(_bytes_of(path / PLAN)) != manifest["plan_crc32"]:
            raise TornError(f"{PLAN} was changed: its checksum is another")
        return Checkpoint(
            path=path,
            next_window=int(manifest["next_window"]),
            plan=read_plan(path / PLAN),
            state=manifest.get("state", {}),
            tensors=tensors,
        )
    except TornError as error:
        raise InputError(f"checkpoint {path}", f"it is torn or no checkpoint: {error}", again) from error
    except (LookupError, TypeError, ValueError, AttributeError, OverflowError, RecursionError) as error:
        raise InputError(
            f"checkpoint {path}", f"it was not written by this memfit: {describe(error)}", again
        ) from error


def _tensors(path: Path, manifest: Mapping[str, Any]) -> TensorFile | None:
    """The checked file of tensors; None where they are in parts, all checked."""
    if "parts" not in manifest:
        file = manifest["file"]
        return open_tensors(path / TENSORS, file["bytes"], file["crc32"])
    for name, part in manifest["parts"].items():
        if not (path / PARTS / name).is_file() or _sum_of(path / PARTS / name) != part["crc32"]:
            raise TornError(f"{PARTS}/{name} is missing or was changed: its checksum is another")
    return None


def _sum_of(path: Path) -> int:
    """Checksum of a file's bytes."""
    crc = 0
    with open(path, "rb") as file:
        while block := file.read(BLOCK):
            crc = zlib.crc32(block, crc)
    return crc


def _write_manifest(folder: Path, next_window: int, plan: Plan, rest: Mapping[str, Any]) -> None:
    start = {"memfit_checkpoint": FORMAT, "next_window": next_window, "plan_crc32": _write_plan(plan, folder / PLAN)}
    _write_synced(folder / MANIFEST, _with_checksum({**start, **rest}))


def is_checkpoint(path: Path) -> bool:
    """Whether a path names a checkpoint (whole or not) rather than a run."""
    return (path / MANIFEST).exists() or (path / TENSORS).exists() or path.is_file()


def _foreign(path: Path) -> InputError:
    what = "not written by memfit"
    if path.is_file():
        with open(path, "rb") as file:
            if looks_like_pickle(file.read(4)):
                what = "a pickle, which can hold code: memfit never opens one"
    write = "write a folder RUN, or RUN/checkpoints/NUMBER; weights of others are loaded in the job's nets()"
    return InputError(f"checkpoint {path}", f"it is foreign, {what}", write)


def _is_number(name: str) -> bool:
    return name.isascii() and name.isdecimal() and name == f"{int(name):08d}"


def _with_checksum(manifest: Mapping[str, Any]) -> bytes:
    """Compact JSON whose first key holds the checksum of all that comes after it."""
    rest = json.dumps(manifest, separators=(",", ":"), allow_nan=False)[1:].encode()
    return (_START % zlib.crc32(rest)).encode() + rest


def _read_manifest(path: Path) -> dict[str, Any]:
    content = _bytes_of(path)
    length = len(_START % 0)
    start, rest = content[:length], content[length:]
    if start != (_START % zlib.crc32(rest)).encode():
        more = "; it is a pickle, which can hold code, and is never opened" if looks_like_pickle(content[:4]) else ""
        raise TornError(f"{path.name} was changed: its checksum is another{more}")
    manifest: dict[str, Any] = json.loads(content)
    if manifest["memfit_checkpoint"] != FORMAT:
        raise TornError(f"{path.name} is of format {manifest['memfit_checkpoint']}, and this memfit reads {FORMAT}")
    return manifest


def _bytes_of(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise TornError(f"{path.name} cannot be read: {error.strerror}") from error


def _write_plan(plan: Plan, path: Path) -> int:
    """Writes a plan, which ``write_plan`` syncs; returns its checksum."""
    try:
        write_plan(plan, path)
    except InputError as error:
        raise error.__cause__ or error from None
    return zlib.crc32(path.read_bytes())


def _write_synced(path: Path, content: bytes) -> None:
    with open(path, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
