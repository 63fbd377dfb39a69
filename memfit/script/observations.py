"""Notes parts of a script that a trace cannot look into: compiled code, CUDA graphs, custom kernels."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from memfit.device.virtual.assumptions import EAGER, PLANNED
from memfit.device.virtual.compiled_functions import note_calls
from memfit.device.virtual.patching import replaced
from memfit.errors import InputError
from memfit.script.lbfgs_history import Histories
from memfit.script.tracer import ScriptTracer
from memfit.sizes import format_size

_COMPILED = {
    PLANNED: "compiled code was given the buffers that torch's inductor plans for it; not validated on a card",
    EAGER: "compiled code was traced as eager",
}


@dataclass(kw_only=True)
class Observations:
    """Lines for ``not_seen``, each kept once, and the ranks of the largest process group that talks over the card."""

    lines: dict[str, None] = field(default_factory=dict)
    ranks: int = 1
    started_processes: bool = False
    training_cut: bool = False
    """Whether a pass that trains was cut short: the script makes more steps."""
    grows: dict[str, None] = field(default_factory=dict)
    """Passes that were cut short and collect what each batch makes, and trainings of a loop that was cut short each of
    which leaves its net, each once."""
    histories: Histories | None = None

    def cut_training(self) -> None:
        """Notes that a pass that trains was cut short."""
        self.training_cut = True

    def cut_collecting(self, line: str, nbytes: int, left: int | None) -> None:
        """Notes that a pass was cut short each batch of which adds ``nbytes``."""
        self.grows[f"{line}: memory grows with each batch"] = None
        rest = "more batches" if left is None else f"{left} more batches"
        self.note(f"{rest} of the loop at {line}, each of which adds {format_size(nbytes)}")

    def leave(self, line: str, nbytes: int) -> None:
        """Notes that each training with an optimizer of ``line`` leaves ``nbytes`` behind, and more of them follow."""
        self.grows[f"{line}: memory grows with each training"] = None
        self.note(f"more trainings with the optimizer of {line}, each of which leaves {format_size(nbytes)} in memory")

    def note(self, line: str) -> None:
        self.lines[line] = None

    def started(self) -> None:
        """Notes that the script has started another process of Python."""
        self.started_processes = True

    def joined(self, ranks: int) -> None:
        """Notes a process group of so many ranks, whether a launcher or the script itself said their number."""
        self.ranks = max(self.ranks, ranks)


@contextmanager
def observed(tracer: ScriptTracer) -> Iterator[Observations]:
    """Context in which compiled code is noted, and CUDA graphs are refused."""
    observations = Observations()
    compile_ = torch.compile

    def compiled(*args: Any, **kwargs: Any) -> Any:
        if not args and kwargs.get("model") is None:
            return partial(compiled, **kwargs)
        place = tracer.lines.here()

        def note(how: str) -> None:
            observations.note(f"{_COMPILED[how]} (torch.compile at {place.file}:{place.line})")

        made = compile_(*args, **kwargs)
        if not note_calls(made, note):
            note(EAGER)
        return made

    def no_graph(*args: Any, **kwargs: Any) -> Any:
        place = tracer.lines.here()
        raise InputError(
            f"{place.file}:{place.line}: a CUDA graph",
            "its memory pool is not modelled",
            "trace the script with its CUDA graphs switched off",
        )

    class NoGraph:
        def __new__(cls, *args: Any, **kwargs: Any) -> Any:
            return no_graph()

    refused: dict[str, Any] = {"CUDAGraph": NoGraph, "graph": NoGraph, "make_graphed_callables": no_graph}
    with ExitStack() as stack:
        stack.enter_context(replaced(torch, compile=compiled))
        stack.enter_context(replaced(torch.cuda, **refused))
        yield observations
