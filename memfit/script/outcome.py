"""The outcome of a traced script: plain data that the traced process hands to the process that started it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from memfit.footprint import Footprint

if TYPE_CHECKING:
    from memfit.events import Trace

NO_VALIDATION, NO_SAVE = "no validation ran", "nothing was saved"
NO_LATER_SAVE = "nothing was saved after training began"
"""Phases that a trace did not see, in ``ScriptOutcome.not_seen``."""
NOTHING_ON_CARD = "a tensor on the card: the script trains on the CPU"
"""The same of a script that was traced for a card and does not use it."""
TRAINS_ON_CPU = "it trains on the CPU, and puts no tensor on the card"
MOVE_TO_CARD = "move its nets and batches to the card, as by .cuda(), or write --device cpu"
"""What is said of such a script, and what to write."""
NOT_ALL_LONGEST = "batches of the longest samples were not made: "
ALL_LONGEST = "every sample was taken to be as long as the longest of the "
"""Beginnings of what ``ScriptOutcome.not_seen`` says of the batches of a ``TraceRequest`` with ``longest_samples``."""
SCRIPT_ENDED = "the script ended"
"""Why a trace stopped, where no loop was cut short."""
SCRIPT_EXITED = "the script exited with"
"""The same where it gave a code that says that it failed."""
NOT_FOLLOWED = "it started other processes, which a trace does not follow"
"""Of a script that ended before its first step: what may be why."""


@dataclass(frozen=True, slots=True)
class Line:
    """A place in the user's code (``file`` is empty if none was on the stack), and the innermost line of a library
    between it and torch (``library`` is empty if there is none).
    """

    file: str = ""
    line: int = 0
    library: str = ""


NOWHERE = Line()


@dataclass(frozen=True, kw_only=True)
class ScriptCommand:
    """A parsed training command.

    Attributes:
        target: the script's path, or the module's name.
        is_module: whether the command has ``-m``.
        args: the script's own arguments.
        environment: variables that a launcher sets.
        world: ranks that the launcher starts.
        launcher: ``accelerate`` if ``args`` are the arguments of that launcher; otherwise empty.
    """

    target: str
    is_module: bool = False
    args: tuple[str, ...] = ()
    environment: dict[str, str] = field(default_factory=dict)
    world: int = 1
    launcher: str = ""


@dataclass(frozen=True, kw_only=True)
class TraceRequest:
    """How a script is traced.

    Attributes:
        device: the card whose rules hold, by its key; ``cpu`` for the CPU.
        memory_bytes: replaces the card's memory; a request past it raises ``torch.OutOfMemoryError`` in the script.
        enforced: whether it does; else the script runs as on a card without a limit.
        steps: complete windows to see; None: as many as show every phase.
        batches: batches of each pass over a loader.
        whole_passes: passes that do not train go on to their end, and loops without gradients too.
        longest_samples: batches of loaders are made of the longest samples of their data sets, and each id of a table
            of sparse gradients is another row.
        lbfgs_iterations: of ``torch.optim.LBFGS``, which the run makes at most; None: as many as fill its history.
        walks: places of the code that select by one value of integers after another, each with the number of values.
        limit_seconds: of the script.
        stubs: packages that stand-ins are imported for.
        assumed: ``file:line`` to the value that is answered there.
        writable: folders whose writes are real.
        unsafe_writes: no sandbox.
        host_bytes: what the process may take of the host's memory.
    """

    command: ScriptCommand
    device: str
    memory_bytes: int | None = None
    enforced: bool = False
    steps: int | None = None
    batches: int | None = None
    whole_passes: bool = False
    longest_samples: bool = False
    lbfgs_iterations: int | None = None
    walks: tuple[tuple[str, int], ...] = ()
    limit_seconds: float = 600.0
    rank: int = 0
    stubs: tuple[str, ...] = ()
    assumed: tuple[tuple[str, int, str], ...] = ()
    writable: tuple[str, ...] = ()
    unsafe_writes: bool = False
    host_bytes: int | None = None
    every_card: bool = True
    asked: bool = False
    """Whether the command names the card or its memory; then exit code 3 says that it does not fit."""


@dataclass(frozen=True, kw_only=True)
class LineUse:
    """Requested live bytes of one line of the user's code."""

    file: str
    line: int
    bytes: int
    tensors: int
    library_line: str = ""
    in_backward: bool = False
    """Whether most of them were allocated by the backward of that line."""
    categories: dict[str, int] = field(default_factory=dict)
    text: str = ""
    """The source of the line."""


@dataclass(frozen=True, kw_only=True)
class KeptVariable:
    """Bytes that a variable of the script keeps alive from one window to the next."""

    name: str
    file: str
    line: int
    """The line that allocated the tensor."""
    bytes: int


@dataclass(frozen=True, kw_only=True)
class MemoryGrowth:
    """A line of which each step leaves tensors behind that later steps do not free."""

    file: str
    line: int
    bytes: int
    """With each step, in blocks of the allocator."""
    of_weights: bool = False
    """Whether weights and the optimizer's state get more: what a forward makes grows with them."""


@dataclass(frozen=True, kw_only=True)
class AssumedAnswer:
    """A value that the trace assumed because it depends on data."""

    where: str
    operator: str
    answer: str
    times: int
    decides_size: bool


@dataclass(frozen=True, kw_only=True)
class CardVerdict:
    """Whether the script fits on one card of the catalogue."""

    name: str
    fits: bool
    verdict: str
    process_bytes: int
    usable_bytes: int


@dataclass(frozen=True, kw_only=True)
class ScriptOption:
    """An edit of the script that saves memory.

    Attributes:
        saves_bytes: of the training peak; None if it was not computed.
        where: the line to edit, ``file:line``.
        write: what to write there.
        for_tools: the same in the words of trainers that have an argument for it, by ``SCRIPT_TOOLS``.
    """

    name: str
    saves_bytes: int | None
    where: str
    write: str
    reason: str = ""
    for_tools: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class FileChange:
    """A file that the script would have written or deleted."""

    path: str
    bytes: int
    deleted: bool = False


@dataclass(frozen=True, kw_only=True)
class ScriptError:
    """How the script failed, as its author would see it.

    Attributes:
        text: the script's own traceback.
        summary: its last line.
        hint: what to write, where that is known.
        out_of_memory: whether it ran out of the card's memory and did not handle that.
    """

    text: str
    summary: str
    hint: str = ""
    out_of_memory: bool = False


@dataclass(frozen=True, kw_only=True, eq=False)
class ScriptOutcome:
    """Everything that a traced script showed."""

    ended: str
    """Why the trace stopped."""
    windows: int
    steps: tuple[tuple[str, int], ...]
    """(line that made the optimizer, its steps)."""
    trace: Trace | None
    footprint: Footprint | None
    world: int = 1
    """Ranks of the process group: the launcher's, or what the script itself asked for."""
    peak_bytes: dict[str, int] = field(default_factory=dict)
    """The largest bytes of live tensors by phase: what was asked for, before the allocator rounds it."""
    lines: tuple[LineUse, ...] = ()
    kept: tuple[KeptVariable, ...] = ()
    growth: tuple[MemoryGrowth, ...] = ()
    """Lines that hold more after each step; empty where all steps of the script ran."""
    options: tuple[ScriptOption, ...] = ()
    cards: tuple[CardVerdict, ...] = ()
    assumed: tuple[AssumedAnswer, ...] = ()
    not_seen: tuple[str, ...] = ()
    files: tuple[FileChange, ...] = ()
    failed_attempts: int = 0
    handler: str = ""
    """The line of a window, ``file:line``, whose code handles memory that fails."""
    lbfgs_iterations: int | None = None
    """Iterations of ``torch.optim.LBFGS`` at most, where the whole training ran and they do not fill its history."""
    walks: tuple[tuple[str, int], ...] = ()
    """Places of the code that select by one value of integers after another, each with the number of values."""
    loaders: int = 0
    """Passes over DataLoaders that the script began."""
    passes_cut: bool = False
    """Whether a pass or a loop that does not train was left early: what the script collects there is not complete."""
    error: ScriptError | None = None
    sandboxed: bool = True
    seconds: float = 0.0
    processor_seconds: float = 0.0
    bare: Trace | None = None
    """The trace without memory that operators take within a call, which does not follow from the batch size."""
    row_lines: Any = None
    """The line (``Line``) of each operator of the trace."""
    facts: tuple[str, ...] = ()
    """What the trace asked of its card, see ``memfit.device.virtual.card_rules``."""
