"""Plan: everything that was decided about a run, and why. A readable, versioned, strict TOML file."""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from memfit.errors import InputError

VERSION = 1


@dataclass(frozen=True, kw_only=True)
class Lever:
    """One choice that could be made, whether it was, what it saves at its phase's peak and what it costs."""

    name: str
    taken: bool
    saves_bytes: int
    costs: str
    reason: str


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A job, its geometry, and how it is put onto a device."""

    job: str
    settings: dict[str, Any]
    device: str
    """A card of the catalogue, or cpu."""
    budget_bytes: int
    """What the run may take: usable bytes of the card, or the tensors' budget on a CPU."""
    unit: str
    global_batch: int
    micro_batch: int
    micro_batches: list[list[int]]
    """For each data-parallel rank, the sizes of one window's micro-batches, in units."""
    arithmetic: str
    engine: str
    precision: str
    seed: int
    checkpointing: dict[str, str] = field(default_factory=dict)
    """Mode by module path; modules that are not named keep what they save."""
    reasons: dict[str, str] = field(default_factory=dict)
    """Why each choice was made."""
    levers: list[Lever] = field(default_factory=list)
    phases: dict[str, dict[str, Any]] = field(default_factory=dict)
    """The predicted Footprint, by phase."""
    step_seconds: float | None = None
    """Estimated time of one window; absent where the device's rates are not known."""


def write_plan(plan: Plan, path: str | Path) -> None:
    """Writes a plan file beside its place and renames it there, so that none is ever half-written."""
    import os

    import tomli_w

    values = {key: value for key, value in asdict(plan).items() if value is not None}
    values["settings"] = {key: value for key, value in values["settings"].items() if value is not None}
    for phase in values["phases"].values():
        phase.pop("seconds", None)
    text = tomli_w.dumps({"memfit_plan": VERSION, **values})
    target = Path(path)
    beside = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        beside.write_text(text)
        beside.replace(target)
    except OSError as error:
        raise InputError(f"plan file {path}", f"cannot be written: {error.strerror}", "write --out to a folder that can be written") from error


def read_plan(path: str | Path) -> Plan:
    """Reads a plan file.

    Raises:
        InputError: no such file, not TOML, another version, a key that is missing, unknown, or of another type.
    """
    try:
        text = Path(path).read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"plan file {path}", f"cannot be read: {getattr(error, 'strerror', None) or 'not text'}", "write the path of a file that memfit plan --out wrote") from error
    try:
        values = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise InputError(f"plan file {path}", f"not valid TOML: {error}", "make it again with memfit plan --out") from error
    version = values.pop("memfit_plan", None)
    if version is None:
        raise InputError(f"plan file {path}", "it has no memfit_plan version, so it is no plan", "write the path of a file that memfit plan --out wrote")
    if version != VERSION:
        raise InputError(f"plan file {path}", f"it is of version {version}, and this memfit reads version {VERSION}", "make it again with memfit plan --out")
    return _checked(values, str(path))


def _checked(values: dict[str, Any], path: str) -> Plan:
    known = {field.name: field for field in fields(Plan)}
    for key in values:
        if key not in known:
            near = difflib.get_close_matches(key, known, n=1)
            raise InputError(f"plan file {path}: {key}", "a plan has no such key", f"write {near[0]}" if near else "take the key out")
    kinds = {"str": str, "int": int, "dict": dict, "list": list, "float": (int, float)}
    for name, one in known.items():
        required = name in ("job", "settings", "device", "budget_bytes", "unit", "global_batch", "micro_batch", "micro_batches", "arithmetic", "engine", "precision", "seed")
        if name not in values:
            if required:
                raise InputError(f"plan file {path}", f"the key {name} is missing", "make it again with memfit plan --out")
            continue
        kind = kinds[str(one.type).split("[")[0].split(" ")[0]]
        if not isinstance(values[name], kind) or isinstance(values[name], bool):  # type: ignore[arg-type]
            raise InputError(f"plan file {path}: {name} = {values[name]!r}", f"not a {str(one.type)}", "make it again with memfit plan --out")
    for name in ("budget_bytes", "global_batch", "micro_batch"):
        if values[name] < 1:
            raise InputError(f"plan file {path}: {name} = {values[name]}", "less than 1", "make it again with memfit plan --out")
    sizes = values["micro_batches"]
    if not all(isinstance(rank, list) and all(isinstance(size, int) and size >= 0 for size in rank) for rank in sizes):
        raise InputError(f"plan file {path}: micro_batches", "not a list of whole numbers for each rank", "make it again with memfit plan --out")
    if sum(map(sum, sizes)) != values["global_batch"]:
        seen = f"plan file {path}: micro_batches sum to {sum(map(sum, sizes))}"
        raise InputError(seen, f"the global batch is {values['global_batch']}", "make them agree")
    values["levers"] = [_lever(lever, path) for lever in values.get("levers", [])]
    return Plan(**values)


def _lever(value: Mapping[str, Any], path: str) -> Lever:
    try:
        return Lever(**value)
    except TypeError:
        raise InputError(f"plan file {path}: levers", "an entry is not a lever", "make it again with memfit plan --out") from None
