"""Plan: every decision about a run and its reason, kept as a readable, versioned TOML file that is checked strictly."""

from __future__ import annotations

import difflib
import typing
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from memfit import toml
from memfit.atomic_file import write_atomic
from memfit.errors import InputError, unwritable, why_unreadable
from memfit.job import Precision
from memfit.job_path import folder_of_job, job_from_here
from memfit.mesh import MeshShape, mesh_of
from memfit.printable import shortened

VERSION = 1
MODES = ("keep", "selective", "full", "offload")
"""What happens to the activations that a module saves for its backward."""
PLACES = {"validation": ("here", "skip"), "saving": ("here",)}
"""Where each phase may run."""
STATE_PLACES = ("device", "host")
"""Where optimizer state and the weights' average may be kept between steps."""
IMPLEMENTATIONS = ("job", "loop", "foreach", "fused")
"""How optimizers step: as the job has it, or by this implementation where they support it."""
ENGINES = ("single", "ddp", "fsdp2", "zero1", "zero2", "zero3")
WRITING = ("synchronous", "asynchronous")
"""Whether training waits while a checkpoint is written, or continues while a copy is written."""
ALLOCATORS = ("default", "expandable_segments")
"""How the card's caching allocator reserves its segments."""
MOST_WHOLE = 2**63 - 1
"""The largest whole number that every reader of TOML takes."""
LEAST_BUDGET, MOST_BUDGET = 1 << 20, 1 << 60
"""Bytes: a plan of less, or more, was not made for a machine."""
PRECISIONS = typing.get_args(Precision)


@dataclass(frozen=True, kw_only=True)
class MemoryOption:
    """A memory-saving option: whether the plan applies it, what it saves and what it costs, with the rest unchanged.

    What it saves is how far a phase's peak of tensors' bytes falls (for the expandable allocator: of reserved bytes).
    """

    name: str
    applied: bool
    saves_bytes: int
    """The largest saving of any phase; 0 where every phase needs more."""
    costs: str
    reason: str
    saves: dict[str, int] = field(default_factory=dict)
    """Bytes by phase. A phase that is absent is unknown; a negative number means that the phase needs more."""
    seconds: float | None = None
    """Added time of one window, or of one validation for a validation option; absent where it is unknown. Negative: the
    option is faster."""
    unknown: str = ""
    """What is unknown, and why."""
    changes_learning: bool = False
    """Whether training with it learns other weights, beyond rounding."""


@dataclass(frozen=True, kw_only=True)
class PhasePolicy:
    """What frees memory for validation or saving; everything is restored afterwards. The defaults cost nothing."""

    where: str = "here"
    """here, or skip (validation alone)."""
    gradients: str = "free"
    """free: drop the last window's gradients; keep."""
    optimizer: str = "keep"
    """aside: move its state to the host (in a CPU run: to a file); keep."""
    items: int | None = None
    """Items in one validation batch; absent: the same as in a training micro-batch."""
    settings: dict[str, Any] = field(default_factory=dict)
    """Settings of the job for this phase only, for example a decoder's slice."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A job, its batch geometry, and how it runs on a device."""

    job: str
    settings: dict[str, Any]
    device: str
    """A card of the catalogue, or cpu."""
    budget_bytes: int
    """Memory that the run may use: the card's usable bytes, or the budget for tensors on a CPU."""
    unit: str
    global_batch: int
    micro_batch: int
    micro_batches: list[list[int]]
    """Sizes of one window's micro-batches in units, a list for each data-parallel rank."""
    arithmetic: str
    engine: str
    precision: str
    seed: int
    job_folder: str | None = None
    """The folder in which the relative path of the job's file holds; absent: unknown, or there is no such path."""
    checkpointing: dict[str, str] = field(default_factory=dict)
    """Mode by module path; a module that is not named keeps its activations."""
    validate_every: int | None = None
    """Windows between validations; 0: no validation; absent: the job's own."""
    validation: PhasePolicy = field(default_factory=PhasePolicy)
    saving: PhasePolicy = field(default_factory=PhasePolicy)
    implementation: str = "job"
    """How optimizers step: job, loop, foreach or fused; see ``memfit.apply.optimizer_implementation``."""
    optimizer_state: str = "device"
    """host: optimizer state stays in host memory between steps and visits the device in parts; device."""
    average: str = "device"
    """host or device: where the moving average of the weights is kept, if the job has one."""
    idle_nets: str = "keep"
    """aside: nets that a phase does not use (``Job.net_phases``) move to the host (in a CPU run: to a file); keep."""
    learning_rate: float = 1.0
    """Factor on the job's learning rates."""
    warmup_windows: int = 0
    """Windows over which the learning rates rise from the job's own to the scaled ones."""
    checkpoint_writing: str = "synchronous"
    read_ahead_bytes: int | None = None
    """Host memory of each rank for batches that workers have read before their window; absent: 1 GiB."""
    copy_ahead_bytes: int = 0
    """The most that copies of those batches take of a card beside its phases, in the pool of their own stream; 0: the
    copies have none, and wait for what is computed before them."""
    state_on_host_bytes: int = 0
    """Predicted host memory of each rank for state that is kept there beside a card."""
    allocator: str = "default"
    """expandable_segments: ``memfit run`` sets PYTORCH_CUDA_ALLOC_CONF to it, unless the variable is set."""
    mesh: dict[str, int] = field(default_factory=dict)
    """Ranks by dimension, as ``memfit.mesh.MeshShape`` names them; empty: all in the one that the engine is for."""
    engine_choices: dict[str, Any] = field(default_factory=dict)
    """The engine's own choices, by the names that ``memfit.engine.factory`` lists; absent: its defaults."""
    net_kind: str = ""
    """What its step computes, and in which type, as in ``Trace.net_kind``; empty: unknown."""
    reasons: dict[str, str] = field(default_factory=dict)
    """The reason for each choice."""
    options: list[MemoryOption] = field(default_factory=list)
    phases: dict[str, dict[str, Any]] = field(default_factory=dict)
    """The predicted Footprint, by phase."""
    stages: list[dict[str, Any]] = field(default_factory=list)
    """The predicted stages of a pipeline, as ``StageFigures``; empty without ``pp``."""
    step_seconds: float | None = None
    """Estimated time of one window; absent where the device's rates are unknown."""
    step_seconds_low: float | None = None
    """Lower end of the estimate by its measured error; absent where no error was measured on the device."""
    step_seconds_high: float | None = None

    @property
    def mesh_shape(self) -> MeshShape | None:
        """The mesh; None where all ranks are in the dimension that the engine is for."""
        return mesh_of(self.mesh, "the plan's mesh") if self.mesh else None

    @property
    def ranks(self) -> int:
        """Processes of a run, each on a device of its own."""
        return MeshShape(**self.mesh).world if self.mesh else len(self.micro_batches)


def write_plan(plan: Plan, path: str | Path) -> None:
    """Writes a plan file, whole or not at all.

    Raises:
        InputError: it cannot be written, or holds the name of a file that is not UTF-8.
    """
    import tomli_w

    plan = replace(plan, job_folder=plan.job_folder or folder_of_job(plan.job))
    values = {key: value for key, value in asdict(plan).items() if value is not None}
    values["settings"] = _without_none(values["settings"])
    for name in ("options", "stages"):
        values[name] = [_without_none(row) for row in values[name]]
    for phase in PLACES:
        values[phase] = _without_none(values[phase])
    for phase in values["phases"].values():
        phase.pop("seconds", None)
    text = tomli_w.dumps({"memfit_plan": VERSION, **values})
    try:
        text.encode()
    except UnicodeEncodeError as error:
        line = text[: error.end].splitlines()[-1]
        why = f"a plan file is UTF-8, and the name in {line!r} is not"
        raise InputError(f"plan file {path}", why, "rename that file or folder") from None
    target = Path(path)
    try:
        write_atomic(target, text)
    except OSError as error:
        raise unwritable(f"plan file {path}", error) from error


def read_plan(path: str | Path) -> Plan:
    """Reads a plan file. A job whose file is not here, but in the folder that the plan names, gets its absolute path.

    Raises:
        InputError: no such file, not TOML, another version, a key that is missing, unknown, or of another type.
    """
    try:
        text = Path(path).read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(
            f"plan file {path}",
            f"cannot be read: {why_unreadable(error)}",
            "write the path of a file that memfit plan --out wrote",
        ) from error
    try:
        values = toml.loads(text)
    except toml.TOMLDecodeError as error:
        raise InputError(
            f"plan file {path}", f"not valid TOML: {error}", "make it again with memfit plan --out"
        ) from error
    version = values.pop("memfit_plan", None)
    if version is None:
        raise InputError(
            f"plan file {path}",
            "it has no memfit_plan version, so it is no plan",
            "write the path of a file that memfit plan --out wrote",
        )
    if version != VERSION or isinstance(version, bool):
        raise InputError(
            f"plan file {path}",
            f"it is of version {version}, and this memfit reads version {VERSION}",
            "make it again with memfit plan --out",
        )
    plan = _checked(_with_current_names(values), str(path))
    job, folder = job_from_here(plan.job, plan.job_folder)
    return replace(plan, job=job, job_folder=folder)


def _with_current_names(values: dict[str, Any]) -> dict[str, Any]:
    """A plan file's values where ``levers`` and ``taken``, as earlier versions wrote them, have today's names."""
    if "options" in values or not isinstance(values.get("levers"), list):
        return values
    values = dict(values)
    options = values.pop("levers")
    for option in options:
        if isinstance(option, dict) and "applied" not in option and "taken" in option:
            option["applied"] = option.pop("taken")
    return {**values, "options": options}


_AGAIN = "make it again with memfit plan --out"
_KINDS: dict[str, tuple[type | tuple[type, ...], str]] = {
    "str": (str, "a text"),
    "int": (int, "a whole number"),
    "float": ((int, float), "a number"),
    "bool": (bool, "true or false"),
    "dict": (dict, "a table"),
    "list": (list, "a list"),
    "PhasePolicy": (dict, "a table"),
}


def _checked(values: dict[str, Any], path: str) -> Plan:
    """The plan with these values, each checked alone and against the others."""
    _check_keys(values, Plan, f"plan file {path}")
    for name, value in values.items():
        if type(value) is int and value > MOST_WHOLE:
            seen = f"plan file {path}: {name} = {shortened(str(value), 40)}"
            raise InputError(seen, f"more than {MOST_WHOLE}, the largest whole number of a TOML file", _AGAIN)
    for name, least in {"budget_bytes": 1, "global_batch": 1, "micro_batch": 1, "seed": 0}.items():
        if values[name] < least:
            raise InputError(f"plan file {path}: {name} = {values[name]}", f"less than {least}", _AGAIN)
    rate = values.get("learning_rate", 1.0)
    if not 0 < rate < float("inf"):
        raise InputError(f"plan file {path}: learning_rate = {rate}", "not a number above 0", "write 1.0")
    for name in ("step_seconds", "step_seconds_low", "step_seconds_high"):
        if not 0 <= values.get(name, 0) < float("inf"):
            raise InputError(f"plan file {path}: {name} = {values[name]}", "not a number of 0 or more", _AGAIN)
    for name, least in {"read_ahead_bytes": 1, "copy_ahead_bytes": 0, "state_on_host_bytes": 0}.items():
        if values.get(name, least) < least:
            raise InputError(f"plan file {path}: {name} = {values[name]}", f"less than {least}", _AGAIN)
    if values.get("warmup_windows", 0) < 0:
        seen = f"plan file {path}: warmup_windows = {values['warmup_windows']}"
        raise InputError(seen, "less than 0", "write 0 for no warm-up")
    every = values.get("validate_every", 0)
    if every < 0:
        raise InputError(f"plan file {path}: validate_every = {every}", "less than 0", "write 0 for no validation")
    if values["budget_bytes"] < LEAST_BUDGET or values["budget_bytes"] > MOST_BUDGET:
        seen = f"plan file {path}: budget_bytes = {values['budget_bytes']}"
        raise InputError(seen, "no budget that a process can have (1 MiB to 1 EiB)", _AGAIN)
    _check_word(f"plan file {path}: idle_nets", values.get("idle_nets", "keep"), ("keep", "aside"))
    for key in ("optimizer_state", "average"):
        _check_word(f"plan file {path}: {key}", values.get(key, STATE_PLACES[0]), STATE_PLACES)
    _check_word(f"plan file {path}: implementation", values.get("implementation", "job"), IMPLEMENTATIONS)
    _check_word(f"plan file {path}: precision", values["precision"], PRECISIONS)
    _check_word(f"plan file {path}: engine", values["engine"], ENGINES)
    _check_word(f"plan file {path}: checkpoint_writing", values.get("checkpoint_writing", WRITING[0]), WRITING)
    _check_word(f"plan file {path}: allocator", values.get("allocator", ALLOCATORS[0]), ALLOCATORS)
    for module, mode in values.get("checkpointing", {}).items():
        _check_word(f"plan file {path}: checkpointing.{module}", mode, MODES)
    own = values["settings"].get("precision", values["precision"])
    if own != values["precision"]:
        raise InputError(
            f"plan file {path}: precision = {values['precision']!r}",
            f"settings.precision is {own!r}",
            "make them agree",
        )
    _check_sizes(values, path)
    _check_mesh(values, path)
    for name, phase in values.get("phases", {}).items():
        if not isinstance(phase, dict) or not all(
            isinstance(phase.get(key), int) for key in ("allocated_bytes", "process_bytes")
        ):
            raise InputError(
                f"plan file {path}: phases.{name}", "not a table with allocated_bytes and process_bytes", _AGAIN
            )
        categories = phase.get("categories", {})
        if not isinstance(categories, dict) or not all(type(nbytes) is int for nbytes in categories.values()):
            raise InputError(f"plan file {path}: phases.{name}.categories", "not a table of whole numbers", _AGAIN)
    for stage in values.get("stages", []):
        if not _is_stage(stage):
            write = "names of modules, their number, and numbers of seconds and bytes"
            raise InputError(f"plan file {path}: stages", f"{stage!r} is not a table of {write}", _AGAIN)
    for option in values.get("options", []):
        if not isinstance(option, dict):
            raise InputError(f"plan file {path}: options", f"{option!r} is not a table", _AGAIN)
        _check_keys(option, MemoryOption, f"plan file {path}: options")
        if not all(type(nbytes) is int for nbytes in option.get("saves", {}).values()):
            raise InputError(f"plan file {path}: options.saves", "a phase without a whole number of bytes", _AGAIN)
    policies = {phase: _policy(values[phase], phase, path) for phase in PLACES if phase in values}
    return Plan(**{**values, **policies, "options": [MemoryOption(**option) for option in values.get("options", [])]})


def _is_stage(values: Any) -> bool:
    """Whether it has the values of ``StageFigures``; the bytes of a stage that was not traced are absent."""
    kinds = {"first_module": str, "last_module": str, "modules": int, "forward_seconds": float}
    kinds |= {"backward_seconds": float, "process_bytes": int}
    return isinstance(values, dict) and all(
        type(values[key]) is kind if key in values else key == "process_bytes" for key, kind in kinds.items()
    )


def _without_none(values: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in values.items() if value is not None}


def _policy(values: Any, phase: str, path: str) -> PhasePolicy:
    where = f"plan file {path}: {phase}"
    if not isinstance(values, dict):
        raise InputError(f"{where} = {values!r}", "not a table", _AGAIN)
    _check_keys(values, PhasePolicy, where)
    policy = PhasePolicy(**values)
    _check_word(f"{where}.where", policy.where, PLACES[phase])
    _check_word(f"{where}.gradients", policy.gradients, ("free", "keep"))
    _check_word(f"{where}.optimizer", policy.optimizer, ("aside", "keep"))
    if policy.items is not None and policy.items < 1:
        raise InputError(f"{where}.items = {policy.items}", "less than 1", "write 1 or more, or take the key out")
    return policy


def _check_keys(values: Mapping[str, Any], kind: type[Any], where: str) -> None:
    """Refuses a key that is unknown or missing, and a value of another type."""
    known = {field.name: field for field in fields(kind)}
    for key, value in values.items():
        if key not in known:
            near = difflib.get_close_matches(key, known, n=1)
            raise InputError(f"{where}: {key}", "no such key", f"write {near[0]}" if near else "take the key out")
        wants, words = _KINDS[str(known[key].type).split("[")[0].split(" ")[0]]
        if not isinstance(value, wants) or isinstance(value, bool) != (wants is bool):
            raise InputError(f"{where}: {key} = {value!r}", f"not {words}", _AGAIN)
    for key, expected in known.items():
        if key not in values and expected.default is MISSING and expected.default_factory is MISSING:
            raise InputError(where, f"the key {key} is missing", _AGAIN)


def _check_word(where: str, word: Any, words: Sequence[str]) -> None:
    if word not in words:
        near = difflib.get_close_matches(str(word), words, n=1, cutoff=0)
        raise InputError(f"{where} = {word!r}", f"not one of {', '.join(words)}", f"write {near[0]}")


def _check_mesh(values: dict[str, Any], path: str) -> None:
    """Refuses a mesh that is none, or whose data-parallel ranks are not those of the micro-batches."""
    if not values.get("mesh"):
        return
    where = f"plan file {path}: mesh"
    mesh, shares = mesh_of(values["mesh"], where), len(values["micro_batches"])
    if mesh.data_ranks != shares:
        why = f"it has {mesh.data_ranks} data-parallel ranks, and micro_batches has {shares}"
        raise InputError(f"{where} = {mesh}", why, _AGAIN)


def _check_sizes(values: dict[str, Any], path: str) -> None:
    sizes = values["micro_batches"]
    if not all(isinstance(rank, list) and all(type(size) is int and size >= 0 for size in rank) for rank in sizes):
        raise InputError(f"plan file {path}: micro_batches", "not a list of whole numbers for each rank", _AGAIN)
    total, largest = sum(map(sum, sizes)), max((size for rank in sizes for size in rank), default=0)
    if values["engine"] == "single" and len(sizes) != 1:
        seen = f"plan file {path}: micro_batches of {len(sizes)} ranks"
        raise InputError(seen, "engine = 'single' has one rank", "write one list in it, or engine = 'ddp'")
    if total != values["global_batch"]:
        seen = f"plan file {path}: micro_batches sum to {total}"
        raise InputError(seen, f"the global batch is {values['global_batch']}", "make them agree")
    if largest > values["micro_batch"]:
        raise InputError(
            f"plan file {path}: a micro-batch of {largest}",
            f"the largest is micro_batch = {values['micro_batch']}",
            "make them agree",
        )
