"""The catalogue of cards: memory, rates and links by name, each figure with its source. See catalogue.toml."""

from __future__ import annotations

import difflib
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from importlib.resources import files
from typing import Any, TypeVar

from memfit.errors import InputError

Entry = TypeVar("Entry")

CUBLAS_WORKSPACE, CUBLAS_WORKSPACE_LARGE = (4096 * 2 + 16 * 8) * 1024, 32 << 20
"""Bytes of one cuBLAS workspace, as parseChosenWorkspaceSize in libtorch_cuda.so of torch 2.13.0 computes it."""


def cublas_workspace_bytes(compute_capability: tuple[int, int]) -> int:
    """One workspace's bytes by default. The caching allocator holds one for each thread and stream that multiplies."""
    return CUBLAS_WORKSPACE_LARGE if compute_capability[0] in (9, 10, 12) else CUBLAS_WORKSPACE


@dataclass(frozen=True, kw_only=True)
class Device:
    """A card or processor. Bytes, bytes a second and floating point operations a second; None: not known."""

    key: str
    """What the command line calls it."""
    name: str
    """What its driver calls it."""
    compute_capability: tuple[int, int] | None = None
    multiprocessors: int | None = None
    memory_bytes: int | None = None
    """Total memory as CUDA reports it; of a CPU, as the operating system does."""
    usable_bytes: int | None = None
    """What a process alone on the device may take: its context, and what its allocator reserves."""
    bf16_flops: float | None = None
    fp16_flops: float | None = None
    tf32_flops: float | None = None
    fp32_flops: float | None = None
    bandwidth: float | None = None
    """Of its memory."""
    board_watts: float | None = None
    """The most that the board draws."""
    link: str | None = None
    link_bytes: float | None = None
    """To another card or to the host, a second, in one direction."""
    context_bytes: int | None = None
    """Held by a process outside the allocator: context, loaded kernels and libraries' handles."""
    context_low: int | None = None
    context_high: int | None = None
    nccl_bytes: int | None = None
    """Held by each communicator."""
    sources: dict[str, str] = field(default_factory=dict, compare=False)
    """Where each figure is from, by the name of its field."""

    @property
    def is_cuda(self) -> bool:
        return self.key != "cpu"

    @property
    def cublas_workspace_bytes(self) -> int | None:
        """Of one cuBLAS workspace, which PyTorch takes out of the allocator."""
        if self.compute_capability is None:
            return None
        return cublas_workspace_bytes(self.compute_capability)


@dataclass(frozen=True, kw_only=True)
class Interconnect:
    """A way from rank to rank."""

    key: str
    """What the command line calls it."""
    name: str
    bytes: float
    """A second and rank, in one direction."""
    step_seconds: float
    """Of one step of a ring, whatever it carries."""
    sources: dict[str, str] = field(default_factory=dict, compare=False)


@cache
def _tables() -> dict[str, Any]:
    return tomllib.loads(files("memfit.device.hardware").joinpath("catalogue.toml").read_text())


@cache
def interconnects() -> dict[str, Interconnect]:
    """Every interconnect of catalogue.toml, by key."""
    return {key: Interconnect(key=key, **_split(table)[0], sources=_split(table)[1])
            for key, table in _tables()["interconnects"].items()}  # fmt: skip


def interconnect_of(device: Device) -> Interconnect | None:
    """What joins cards of this kind in one host: the card's own link; None where it is not known."""
    return next((one for one in interconnects().values() if one.name == device.link), None)


def nccl_bytes(device: Device) -> tuple[int, int, int]:
    """(low, usual, high) bytes of one communicator of a process, outside of the allocator."""
    low, usual, high = _tables()["unmeasured_nccl"]["value"]
    return (low, device.nccl_bytes or usual, max(high, device.nccl_bytes or 0))


@cache
def catalogue() -> dict[str, Device]:
    """Every device of catalogue.toml, by key."""
    tables = _tables()
    held_back, unmeasured = tables["held_back"], tables["unmeasured_context"]
    cards = {key: table for key, table in tables.items() if "name" in table}
    return {key: _device(key, table, held_back, unmeasured) for key, table in cards.items()}


def find_device(name: str) -> Device:
    """The device that the command line calls so.

    Raises:
        InputError: no such device; names the nearest one.
    """
    return _named("device", catalogue(), name)


def _named(what: str, known: Mapping[str, Entry], name: str) -> Entry:
    keys = {_plain(key): key for key in known}
    plain = _plain(name)
    if plain in keys:
        return known[keys[plain]]
    same = [key for key in known if plain and _plain(key).startswith(plain)]
    without_size = _plain(re.sub(r"[-_ ]\d+ *gi?b?$", "", name.lower()))
    if not same:
        same = [key for short, key in keys.items() if short == without_size]
    near = same or difflib.get_close_matches(name.lower(), known, n=1, cutoff=0.5)
    other = (
        "write --device NAME of the most similar one with --memory SIZE" if what == "device" else "write one of them"
    )
    write = f"write {' or '.join(near)}" if near else other
    raise InputError(f"{what} {name!r}", f"not one of {', '.join(known)}", write)


def _plain(name: str) -> str:
    """``RTX 4090`` and ``rtx-4090`` as ``rtx4090``."""
    return re.sub(r"[^a-z0-9]", "", name.lower())


def with_memory(device: Device, nbytes: int) -> Device:
    """The same device with another memory, all of it usable."""
    sources = {**device.sources, "memory_bytes": "given", "usable_bytes": "given"}
    return replace(device, memory_bytes=nbytes, usable_bytes=nbytes, sources=sources)


def figures(device: Device) -> dict[str, Any]:
    """A device as plain data for JSON; unknown figures are null."""
    names = [name for name in Device.__dataclass_fields__ if name not in ("key", "name", "sources")]
    known = {name: getattr(device, name) for name in names}
    return {
        "name": device.key, "card": device.name, **known,
        "cublas_workspace_bytes": device.cublas_workspace_bytes, "sources": device.sources,
    }  # fmt: skip


def _split(table: dict[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
    """(values, sources) of a table."""
    values = {name: entry["value"] if isinstance(entry, dict) else entry for name, entry in table.items()}
    return values, {name: entry["source"] for name, entry in table.items() if isinstance(entry, dict)}


def _device(key: str, table: dict[str, Any], held_back: dict[str, Any], unmeasured: dict[str, Any]) -> Device:
    values, sources = _split(table)
    if "compute_capability" in values:
        values["compute_capability"] = tuple(values["compute_capability"])
        context = table.get("context_bytes", unmeasured)
        values["context_low"], values["context_bytes"], values["context_high"] = context["value"]
        sources["context_bytes"] = context["source"]
        values["usable_bytes"] = values["memory_bytes"] - held_back["value"]
        sources["usable_bytes"] = held_back["source"]
    return Device(key=key, **values, sources=sources)
