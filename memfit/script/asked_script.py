"""A training command to which several questions are asked, as to a job: a micro-batch is what ``{batch}`` stands for.

Each question runs the script in a process of its own. A card that answers alike whatever a trace asked of its card
shares that trace, and a size between traced ones follows from them, as of a job (``memfit.planner.asked_job``).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from memfit.device.hardware.catalogue import Device, find_device
from memfit.errors import InputError
from memfit.job import Job, Shape
from memfit.planner.asked_job import DEFAULTS, AskedJob
from memfit.planner.job_facts import JobFacts, Policy
from memfit.planner.prediction import TracedQuestion, device_facts
from memfit.script.batch_scan import PLACEHOLDER, at_size
from memfit.script.command import parse_command
from memfit.script.launch import free_host_bytes, trace_script
from memfit.script.outcome import (
    MOVE_TO_CARD,
    NO_LATER_SAVE,
    NO_SAVE,
    NO_VALIDATION,
    NOTHING_ON_CARD,
    SCRIPT_EXITED,
    TRAINS_ON_CPU,
    ScriptOutcome,
    TraceRequest,
)
from memfit.script.side_by_side import trace_scripts

_PHASES = (NO_VALIDATION, NO_SAVE, NO_LATER_SAVE)
AS_WRITTEN = "as written"
"""The only policy of a script: memfit does not edit it."""


_OF_CARDS = re.compile(r"cuda|nvidia|\bgpus?\b", re.IGNORECASE)
"""In the error of a script that is traced for a CPU: it asks for a card."""


class AskedScript(AskedJob):
    """The command's questions.

    Args:
        words: the command, ``{batch}`` in place of its micro-batch.

    Raises:
        InputError: the command names no script.
    """

    def __init__(self, words: Sequence[str]) -> None:
        super().__init__(" ".join(words), self._no_job)
        self._words = tuple(words)
        self._command = parse_command(words)

    @property
    def facts(self) -> JobFacts:
        """What questions need; what only a job has is empty."""
        policy = Policy(name=AS_WRITTEN, checkpointing={}, changes={})
        return JobFacts(
            unit="samples" if self.has_sizes else "batch", longest=None, precision="", checkpoint="none", nets=(),
            own={}, every={}, whole_numbers={}, policies=(policy,),
        )  # fmt: skip

    @property
    def has_sizes(self) -> bool:
        """Whether the command has a place for the micro-batch."""
        return any(PLACEHOLDER in word for word in self._words)

    @property
    def world(self) -> int:
        """Ranks that the command starts."""
        return self._command.world

    def request(self, device: Device) -> TraceRequest:
        """How the script is traced for a device."""
        own_memory = device.is_cuda and device.memory_bytes != find_device(device.key).memory_bytes
        return TraceRequest(
            command=self._command, device=device.key, memory_bytes=device.memory_bytes if own_memory else None,
            every_card=False, host_bytes=free_host_bytes(),
        )  # fmt: skip

    def prepare(self, shape: Shape, devices: Sequence[Device], **choices: Any) -> None:
        """Traces side by side what cards answer differently: the first card's trace shows what is asked of a card."""
        if len(devices) < 2:
            return
        first, identity = self.question(shape, devices[0], **choices), self._identity(shape, {}, choices)
        others: dict[str, Device] = {}
        for device in devices:
            if self._exact(identity, shape.items, device) is None:
                others.setdefault(repr(device_facts(device, first.facts.keys() - {"cpu"})), device)
        outcomes = trace_scripts([at_size(self.request(device), shape.items) for device in others.values()])
        for device, outcome in zip(others.values(), outcomes, strict=True):
            self._note(identity, shape, self._question(outcome, shape, device))

    def _traced(
        self, identity: str, shape: Shape, device: Device, changes: Mapping[str, Any], choices: Mapping[str, Any]
    ) -> TracedQuestion:
        if not self.has_sizes and shape.items != 1:
            why = "the command has no place for the micro-batch"
            raise InputError(
                f"{shape.items} samples", why, f"write {PLACEHOLDER} there, as in --batch-size {PLACEHOLDER}"
            )
        known = {**DEFAULTS, "checkpointing": {}}
        others = [name for name, value in choices.items() if known.get(name) != value]
        if other := next(
            (name for name in ("mesh", *others) if name in others), None
        ):  # a mesh has its engine and ranks
            option = "--accumulate" if other == "micro_batches" else f"--{other}"
            raise InputError(f"{option} with {self.name}", "a script is asked as it is written", f"leave {option} out")
        return self._question(trace_script(at_size(self.request(device), shape.items)), shape, device)

    def _question(self, outcome: ScriptOutcome, shape: Shape, device: Device) -> TracedQuestion:
        trace = self._checked(outcome, device).trace
        assert trace is not None
        trace = replace(trace, assumed=(*map(_left_out, outcome.not_seen), *trace.assumed))
        return TracedQuestion(
            settings={}, shape=shape, unit=self.facts.unit, nets=(), checkpointing={}, engine="single",
            world=outcome.world, traces={0: trace}, allocator="default",
            facts=device_facts(device, outcome.facts),
        )  # fmt: skip

    def _checked(self, outcome: ScriptOutcome, device: Device) -> ScriptOutcome:
        if outcome.error is not None:
            needs_card = not device.is_cuda and _OF_CARDS.search(outcome.error.summary)
            write = "name a card: --device rtx4090" if needs_card else "correct the script"
            hint = outcome.error.hint.replace("write --", "write memfit trace --")  # which alone has these options
            raise InputError(self.name, outcome.error.summary, hint or write)
        if NOTHING_ON_CARD in outcome.not_seen:
            raise InputError(self.name, TRAINS_ON_CPU, MOVE_TO_CARD)
        if outcome.footprint is None or outcome.windows < 2:
            made = f"{outcome.windows or 'no'} optimizer step{'s' * (outcome.windows != 1)}"
            write = "write a command that trains for two steps; memfit trace -- with it says what was seen"
            if outcome.ended.startswith(SCRIPT_EXITED):
                write = "correct what the script says above, such as its arguments"
            raise InputError(self.name, f"it made {made}, and a prediction needs two ({outcome.ended})", write)
        return outcome

    def _no_job(self) -> Job:
        raise InputError(self.name, "a script has no such question", "write a job, as docs/job.md says")


def _left_out(line: str) -> str:
    """A line of what a trace did not see, as an assumption of its prediction."""
    return f"{line} in the traced steps, so that it was not predicted" if line in _PHASES else line
