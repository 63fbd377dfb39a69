"""The catalogue of cards: memory, rates and links by name, each figure with its source. See catalogue.toml."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import cache, lru_cache
from importlib.resources import files
from pathlib import Path
from typing import Any, TypeVar

from memfit import toml
from memfit.device.hardware.card_table import checked_card
from memfit.errors import InputError
from memfit.installation import release_number, version_of
from memfit.user_cache import user_folder

Entry = TypeVar("Entry")

CUBLAS_WORKSPACE, CUBLAS_WORKSPACE_LARGE = (4096 * 2 + 16 * 8) * 1024, 32 << 20
"""Bytes of one cuBLAS workspace, as parseChosenWorkspaceSize in libtorch_cuda.so of torch 2.13.0 computes it."""
LARGE_WORKSPACE_MAJORS = (9, 10, 12)
"""Majors of the compute capabilities with the large workspace: Hopper and Blackwell."""


def cublas_workspace_bytes(compute_capability: tuple[int, int]) -> int:
    """One workspace's bytes by default. The caching allocator holds one for each thread and stream that multiplies."""
    return CUBLAS_WORKSPACE_LARGE if compute_capability[0] in LARGE_WORKSPACE_MAJORS else CUBLAS_WORKSPACE


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
    free_bytes: int = 0
    """Beyond ``usable_bytes``, what is left free on purpose: the interval of a prediction may reach into it."""
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
    network: str | None = None
    """What joins nodes of such cards, as the maker builds them."""
    network_bytes: float | None = None
    """To other nodes, a second and card, in one direction."""
    context_bytes: int | None = None
    """Held by a process outside the allocator: context, loaded kernels and libraries' handles."""
    context_low: int | None = None
    context_high: int | None = None
    context_by_torch: tuple[TorchContext, ...] = ()
    """The same where it differs by the version of torch, or was read from messages of one; see ``with_torch``."""
    nccl_bytes: int | None = None
    """Held by each communicator."""
    validated: bool = True
    """False: no prediction for a card of this kind was ever compared with a measurement, and CUDA's rules may not be
    its own (ROCm)."""
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
class TorchContext:
    """What a process holds outside the allocator from one version of torch on."""

    since: str
    """The first minor version: "2.2"."""
    low: int
    usual: int
    high: int
    source: str


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
    between_nodes: bool = False
    """Whether it joins nodes, so that ``bytes`` are of one adapter."""
    sources: dict[str, str] = field(default_factory=dict, compare=False)


@cache
def _tables() -> dict[str, Any]:
    return toml.loads(files("memfit.device.hardware").joinpath("catalogue.toml").read_text("utf-8"))


@cache
def interconnects() -> dict[str, Interconnect]:
    """Every interconnect of catalogue.toml, by key."""
    return {key: Interconnect(key=key, **_split(table)[0], sources=_split(table)[1])
            for key, table in _tables()["interconnects"].items()}  # fmt: skip


def networks() -> dict[str, Interconnect]:
    """The interconnects that join nodes, by key."""
    return {key: each for key, each in interconnects().items() if each.between_nodes}


def find_network(name: str) -> Interconnect:
    """The network that the command line calls so.

    Raises:
        InputError: no such network; names the nearest one.
    """
    return _named("network", networks(), name)


def interconnect_of(device: Device) -> Interconnect | None:
    """The interconnect of cards of this kind in one host: the card's own link; None where it is not known."""
    return next((interconnect for interconnect in interconnects().values() if interconnect.name == device.link), None)


def nccl_bytes(device: Device) -> tuple[int, int, int]:
    """(low, usual, high) bytes of one communicator of a process, outside of the allocator."""
    low, usual, high = _tables()["unmeasured_nccl"]["value"]
    return (low, device.nccl_bytes or usual, max(high, device.nccl_bytes or 0))


def catalogue() -> dict[str, Device]:
    """Every device of catalogue.toml and every card that was added, by key; the CPU last."""
    own = _own_catalogue()
    added = added_cards()
    if not added:
        return own
    return {key: card for key, card in own.items() if key != "cpu"} | added | {"cpu": own["cpu"]}


@cache
def _own_catalogue() -> dict[str, Device]:
    cards = {key: table for key, table in _tables().items() if "name" in table}
    return {key: device_from(key, table) for key, table in cards.items()}


def find_device(name: str) -> Device:
    """The device that the command line calls so; ``a100-40gb:1g.5gb`` is a slice of a card.

    Raises:
        InputError: no such device; names the nearest one.
    """
    card, colon, profile = name.partition(":")
    if colon:
        device = _named("device", catalogue(), card)
        slices = mig_slices(device)
        if not slices:
            seen, why = f"device {name!r}", f"no slices of {device.key} are known"
            raise InputError(seen, why, f"write --device {device.key} --memory SIZE")
        if profile.lower() not in slices:
            raise InputError(f"slice {profile!r} of {device.key}", "no such profile", f"write {' or '.join(slices)}")
        return slices[profile.lower()]
    return _named("device", catalogue(), name)


@cache
def mig_slices(device: Device) -> dict[str, Device]:
    """The card's slices (Multi-Instance GPU) by profile; empty where it has none or none are known.

    Rates are the card's, in proportion to the multiprocessors; the bandwidth of the memory in eighths.
    """
    table = dict(_tables()["mig"].get(device.key, {}))
    source = table.pop("source", "")
    return {profile: _slice(device, profile, figures, source) for profile, figures in table.items()}


def _slice(device: Device, profile: str, figures: tuple[float, int, int], source: str) -> Device:
    gib, multiprocessors, eighths = figures
    nbytes = int(gib * 2**30)
    part = multiprocessors / (device.multiprocessors or multiprocessors)
    rates = {name: getattr(device, name) for name in ("bf16_flops", "fp16_flops", "tf32_flops", "fp32_flops")}
    sources = {name: f"the card's x {multiprocessors}/{device.multiprocessors}" for name, rate in rates.items() if rate}
    sources |= {"memory_bytes": source, "usable_bytes": device.sources["usable_bytes"], "bandwidth": source}
    sources |= {"context_bytes": "the whole card's; a slice's was not measured"}
    return replace(
        device, key=f"{device.key}:{profile}", name=f"{device.name} MIG {profile}", multiprocessors=multiprocessors,
        memory_bytes=nbytes, usable_bytes=nbytes - _tables()["held_back"]["value"],
        bandwidth=device.bandwidth and device.bandwidth * eighths / 8, board_watts=None, link=None, link_bytes=None,
        network=None, network_bytes=None, nccl_bytes=None, sources=sources,
        **{name: rate and rate * part for name, rate in rates.items()},
    )  # fmt: skip


def added_cards_file() -> Path:
    """The user's own cards: ``$XDG_CONFIG_HOME/memfit/devices.toml``; it need not exist."""
    return user_folder("XDG_CONFIG_HOME", ".config") / "devices.toml"


def added_cards() -> dict[str, Device]:
    """The cards of ``added_cards_file``, by key.

    Raises:
        InputError: the file is not one that ``memfit devices --add`` takes.
    """
    path = added_cards_file()
    try:
        stamp = path.stat().st_mtime_ns
    except OSError:
        return {}
    return _added(path, stamp)


@lru_cache(maxsize=4)
def _added(path: Path, stamp: int) -> dict[str, Device]:
    return read_cards(path)


def read_cards(path: Path) -> dict[str, Device]:
    """The cards of a file in the format of catalogue.toml: a table for each, with a name, the compute capability and
    the bytes of its memory at least; other figures where they are known, each a value or ``{ value, source }``.

    Raises:
        InputError: no such file, no TOML, or a table that is not a card's.
    """
    example = '[my-card]\nname = "…"\ncompute_capability = [8, 6]\nmemory_bytes = 12622168064'
    if path.exists() and not path.is_file():
        raise InputError(str(path), "not a file of text", f"write {example.splitlines()[0]} and its figures into one")
    try:
        tables = toml.loads(path.read_text("utf-8"))
    except (OSError, UnicodeDecodeError, toml.TOMLDecodeError) as error:
        raise InputError(str(path), str(error), f"write {example.splitlines()[0]} and its figures") from error
    cards = {}
    for key, table in tables.items():
        where = f"[{key}] of {path.name}"
        if ":" in key or key.lower() == "all" or _plain(key) in {_plain(own) for own in _own_catalogue()}:
            raise InputError(where, "the catalogue has a device of that name", "write another name")
        cards[key] = device_from(key, checked_card(where, key, table))
    if not cards:
        raise InputError(str(path), "no table of a card in it", f"write {', '.join(example.splitlines())}")
    return cards


def _named(what: str, known: Mapping[str, Entry], name: str) -> Entry:
    keys = {_plain(key): key for key in known}
    plain = _plain(name)
    if plain in keys:
        return known[keys[plain]]
    same = [key for key in known if plain and _plain(key).startswith(plain)]
    without_size = _plain(re.sub(r"[-_ ]\d+ *gi?b?$", "", name.lower()))
    if not same:
        same = [key for short, key in keys.items() if short == without_size]
    if what == "device" and (size := re.fullmatch(r"(\d+) *g(i?b)?", name.strip().lower())):
        held = int(size[1]) << 30
        same = [key for key, card in known.items() if abs((getattr(card, "memory_bytes", 0) or 0) - held) <= held / 8]
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


def with_torch(device: Device, version: str) -> Device:
    """The same device with what a process of this version of torch holds outside the allocator.

    The newest entry of ``context_by_torch`` that is not newer than the version; as it is where there is none.
    """
    known = [each for each in device.context_by_torch if release_number(each.since) <= release_number(version)]
    if not known:
        return device
    newest = max(known, key=lambda each: release_number(each.since))
    sources = {**device.sources, "context_bytes": f"torch {newest.since} on: {newest.source}"}
    return replace(
        device, context_low=newest.low, context_bytes=newest.usual, context_high=newest.high, sources=sources
    )


def figures(device: Device) -> dict[str, Any]:
    """A device as plain data for JSON; unknown figures are null."""
    unlike = ("key", "name", "sources", "free_bytes")  # names, and what a person leaves free
    names = [name for name in Device.__dataclass_fields__ if name not in unlike]
    known = {name: getattr(device, name) for name in names}
    known["context_by_torch"] = [asdict(each) for each in device.context_by_torch]
    return {
        "name": device.key, "card": device.name, **known,
        "cublas_workspace_bytes": device.cublas_workspace_bytes, "sources": device.sources,
    }  # fmt: skip


def _split(table: dict[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
    """(values, sources) of a table."""
    values = {name: entry["value"] if isinstance(entry, dict) else entry for name, entry in table.items()}
    return values, {name: entry["source"] for name, entry in table.items() if isinstance(entry, dict)}


def device_from(key: str, table: dict[str, Any]) -> Device:
    """A device from its table in the catalogue's format, as the installed version of torch finds it."""
    held_back, unmeasured = _tables()["held_back"], _tables()["unmeasured_context"]
    by_torch = table.get("context_by_torch", {})
    values, sources = _split({name: entry for name, entry in table.items() if name != "context_by_torch"})
    if "compute_capability" in values:
        values["compute_capability"] = tuple(values["compute_capability"])
        context = table.get("context_bytes", unmeasured)
        values["context_low"], values["context_bytes"], values["context_high"] = context["value"]
        sources["context_bytes"] = context["source"]
        values["context_by_torch"] = tuple(_torch_context(since, entry) for since, entry in by_torch.items())
        values["usable_bytes"] = values["memory_bytes"] - held_back["value"]
        sources["usable_bytes"] = held_back["source"]
    return with_torch(Device(key=key, **values, sources=sources), version_of("torch"))


def _torch_context(since: str, entry: dict[str, Any]) -> TorchContext:
    low, usual, high = entry["value"]
    return TorchContext(since=since, low=low, usual=usual, high=high, source=entry["source"])
