"""A job to which several questions are asked: what was traced before is kept, and the job is loaded only to trace.

Every step that was traced is kept in the user's cache for each card architecture, with what its trace depended on.
A size between traced ones follows from them where ``memfit.planner.step_range`` says so, to the byte.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from itertools import chain
from types import TracebackType
from typing import TYPE_CHECKING, Any

from memfit.device.hardware.catalogue import Device
from memfit.job import Job, Shape
from memfit.planner.job_facts import JobFacts, facts_from_json, facts_to_json
from memfit.planner.prediction import (
    Prediction,
    TracedQuestion,
    answer,
    device_facts,
    holds_for,
    question_between,
    question_on,
)

if TYPE_CHECKING:
    from pathlib import Path

    from memfit.planner.hand_over import Handed, HandedOver, LoadedElsewhere
    from memfit.planner.kept_questions import Shelf
    from memfit.trace.scratch_by_size import ScratchBySize


DEFAULTS: Mapping[str, Any] = {
    "micro_batches": 1, "engine": "single", "world": 1, "mesh": None, "rank": None, "engine_choices": None, "plan": None
}  # fmt: skip
"""Choices of ``memfit.planner.predict.trace_question`` that make no other question."""
_OF_SETUP = tuple(name for name in DEFAULTS if name != "micro_batches")
"""Choices that a job is set up by."""
BeforeTracing = Callable[["AskedJob", Callable[[], None] | None], None]


class AskedJob:
    """A context: what was traced within is kept at its end.

    Args:
        name: what to call the job.
        load: makes the job.
        kept: what names the job in the cache, such as its settings; None: nothing is read from it or kept.
        fresh: nothing is read from the cache.
        environment: as the process began with it, by which traces are kept; None: as it is now.
        several: whether more than one step may be traced, each as a process of its own would trace it.
        before_tracing: called once, when the job is loaded and nothing was traced by this process yet, with what sets
            the job up for its next trace; None where it is not traced on one card.
    """

    def __init__(
        self, name: str, load: Callable[[], Job], kept: Mapping[str, Any] | None = None, *, fresh: bool = False,
        environment: Mapping[str, str] | None = None, several: bool = True,
        before_tracing: BeforeTracing | None = None,
    ) -> None:  # fmt: skip
        self.name, self.several = name, several
        self._load = load
        self._before_tracing = before_tracing
        self._elsewhere: LoadedElsewhere | None = None
        self._looked_at: dict[str, int] = {}
        """By step that another process traces, what had been kept last when it was looked for."""
        self._job: Job | None = None
        self._facts: JobFacts | None = None
        self._shelf: Shelf | None = None
        self._known: dict[str, dict[int, list[TracedQuestion]]] = {}
        self._between: dict[tuple[str, Shape], dict[tuple[Any, ...], TracedQuestion | None]] = {}
        """By question and size, what follows from which traced questions, for cards of the same workspaces."""
        self._changed: dict[str, Job] = {}
        self._scratch: dict[str, ScratchBySize] = {}
        self._while_tracing = ExitStack()
        self.traced = 0
        """Questions that needed a trace of this process."""
        if kept is not None:
            from memfit.planner.kept_questions import Shelf

            self._shelf = Shelf(name, kept, fresh=fresh, environment=environment)

    def __enter__(self) -> AskedJob:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._while_tracing.close()
        self.keep()

    def keep(self) -> None:
        """Writes what was traced and remembered until now."""
        if self._shelf is not None:
            self._shelf.keep(loaded=self._job is not None)

    @property
    def job(self) -> Job:
        """The job itself, loaded when it is first needed."""
        if self._job is None:
            self._job = self._load()
        return self._job

    @property
    def facts(self) -> JobFacts:
        """What questions need of the job beside its traces."""
        if self._facts is None:
            kept = self.remembered("facts")
            self._facts = facts_from_json(kept) if kept is not None else None
        if self._facts is None:
            from memfit.planner.job_reading import facts_of

            self._facts = facts_of(self.job)
            self.remember("facts", facts_to_json(self._facts))
        return self._facts

    def longest_with(self, changes: Mapping[str, Any]) -> int | None:
        """The length of the job's longest item under other settings; None where items have no length."""
        what = f"longest {_digest(dict(changes))}"
        known = self.remembered(what)
        if known is None:
            known = [self._with_settings(changes).longest]
            self.remember(what, known)
        longest: int | None = known[0]
        return longest

    def every_with(self, changes: Mapping[str, Any]) -> Mapping[str, str]:
        """Every module that may be recomputed under other settings, such as more layers; mode by module path."""
        what = f"every {_digest(dict(changes))}"
        known: Mapping[str, str] | None = self.remembered(what)
        if known is None:
            from memfit.planner.predict import checkpoint_all, plain_nets

            job = self._with_settings(changes)
            known = checkpoint_all(job, plain_nets(job))
            self.remember(what, known)
        return known

    @property
    def world(self) -> int:
        """Ranks of a question that names none."""
        return 1

    @property
    def micro_batch(self) -> int | None:
        """Units of the micro-batch of a question that names none; None: one of the longest items."""
        return None

    @property
    def is_kept(self) -> bool:
        """Whether what is traced is kept for a later process."""
        return self._shelf is not None and self._shelf.is_on

    @property
    def may_be_kept_now(self) -> bool:
        """Whether what was not kept may be by now: by a process that has the job loaded, although it ended since."""
        return self._job is None and self.is_kept

    @property
    def code(self) -> str:
        """What names the job with all that its answers depend on; empty where nothing is kept."""
        return "" if self._shelf is None else self._shelf.code

    @property
    def socket(self) -> Path | None:
        """Where a process that has the job loaded listens; None where nothing is kept."""
        return None if self._shelf is None else self._shelf.socket

    def look_again(self) -> None:
        """Another process may have kept what was not there before."""
        if self._shelf is not None:
            self._shelf.look_again()

    @property
    def is_outdated(self) -> bool:
        """Whether the job's code or what it read was changed meanwhile: what is traced is then not kept."""
        return self._shelf is not None and self._shelf.is_outdated

    def remembered(self, what: str) -> Any:
        """An answer that was kept; None where there is none."""
        return None if self._shelf is None else self._shelf.answers.get(what)

    def remember(self, what: str, value: Any) -> None:
        """Keeps an answer, which is plain JSON."""
        if self._shelf is not None:
            self._shelf.answers[what] = value

    def predict(self, shape: Shape, device: Device, **choices: Any) -> Prediction:
        """Predicts as ``memfit.planner.predict.predict`` does, to the byte; choices as of ``question``."""
        begin = time.perf_counter()
        prediction = answer(self.question(shape, device, **choices), self.name, device)
        return replace(prediction, seconds=time.perf_counter() - begin)

    def prepare(self, shape: Shape, devices: Sequence[Device], **choices: Any) -> None:
        """Does beforehand what answers the same question for several devices sooner; arguments as of ``question``.

        A process that has the job loaded traces it for several cards at once, one of each kind of kernels.
        """
        changes = choices.get("changes") or {}
        named = {name: value for name, value in choices.items() if name != "changes"}
        mesh = named.get("mesh")
        elsewhere = self.loaded_elsewhere() if mesh is None or mesh.pp == 1 else None
        if elsewhere is None or len(devices) < 2:
            return
        identity = self._identity(shape, changes, named)
        like = self._like(identity, devices[0])
        if like is None:
            return
        from memfit.planner.hand_over import HandedOver

        cards: dict[str, str] = {}
        for device in devices:
            if device.is_cuda and self._kept(identity, shape, device, derive=True) is None:
                cards.setdefault(_digest(device_facts(device, like.facts)), device.key)
        elsewhere.trace_each(
            [HandedOver(shape=shape, device=key, changes=changes, derive=True, choices=named) for key in cards.values()]
        )
        self.look_again()

    def question(
        self, shape: Shape, device: Device, *, changes: Mapping[str, Any] | None = None, derive: bool = True,
        **choices: Any,
    ) -> TracedQuestion:  # fmt: skip
        """The traces of a step: known, derived, or made now.

        Args:
            changes: settings that differ from the job's.
            derive: whether a size may follow from others.
            choices: as of ``memfit.planner.predict.trace_question``.
        """
        mesh = choices.get("mesh")
        rates = {}
        if mesh is not None and mesh.pp > 1:  # each size, and each card, has a cut of its own
            derive = False
            rates = {"rates": [device.key, device.fp32_flops, device.bf16_flops, device.bandwidth]}
        identity = self._identity(shape, changes or {}, choices | rates)
        question = self._kept(identity, shape, device, derive)
        if question is None and self.may_be_kept_now:
            self._trace_elsewhere(shape, device, changes or {}, derive, choices)
            self.look_again()
            question = self._kept(identity, shape, device, derive)
        if question is None:
            question = question_on(self._trace(identity, shape, device, changes or {}, choices), device)
        return question

    def _identity(self, shape: Shape, changes: Mapping[str, Any], choices: Mapping[str, Any]) -> str:
        """What names a question but for its size and its card; of two to the same nets and optimizers, the first half
        is the same (``_like``)."""
        named = {name: value for name, value in choices.items() if (name, value) not in DEFAULTS.items()}
        own = {name: named.pop(name) for name in ("checkpointing", "micro_batches") if name in named}
        return _digest([dict(changes), named]) + _digest([shape.length, own])

    def _note(self, identity: str, shape: Shape, question: TracedQuestion) -> None:
        self.traced += 1
        self._known.setdefault(identity, {}).setdefault(shape.items, []).append(question)
        if self._shelf is not None:
            self._shelf.add(f"{identity}.{shape.items}", question)

    def _kept(self, identity: str, shape: Shape, device: Device, derive: bool) -> TracedQuestion | None:
        question = self._exact(identity, shape.items, device)
        return self._from_others(identity, shape, device) if question is None and derive else question

    def _trace_elsewhere(
        self, shape: Shape, device: Device, changes: Mapping[str, Any], derive: bool, choices: Mapping[str, Any]
    ) -> None:
        """Has a process that has the job loaded trace a step, where there is one."""
        elsewhere = self.loaded_elsewhere() if device.is_cuda else None
        if elsewhere is not None:
            from memfit.planner.hand_over import HandedOver

            step = HandedOver(shape=shape, device=device.key, changes=changes, derive=derive, choices=choices)
            elsewhere.trace(step)

    def begin_epoch_count(self) -> Handed | None:
        """Has a process that has the job loaded count an epoch's units, where this one has not, without waiting."""
        elsewhere = self.loaded_elsewhere()
        return None if elsewhere is None else elsewhere.begin_epoch_count()

    def loaded_elsewhere(self) -> LoadedElsewhere | None:
        """The process that has the job loaded, where this one has not."""
        socket = self.socket
        if self._job is not None or socket is None or not socket.exists():
            return None
        from memfit.planner.hand_over import LoadedElsewhere

        self._elsewhere = self._elsewhere or LoadedElsewhere(socket, self._is_kept_now)
        return self._elsewhere

    def _is_kept_now(self, step: HandedOver) -> bool:
        """Whether a step was kept by another process meanwhile: this very one, not those that it follows from."""
        from memfit.device.hardware.catalogue import find_device

        key = f"{self._identity(step.shape, step.changes, step.choices)}.{step.shape.items}"
        changed_at = self._shelf.changed_at if self._shelf is not None else 0
        if self._shelf is None or self._looked_at.get(f"{key} {step.device}") == changed_at:
            return False
        self._looked_at[f"{key} {step.device}"] = changed_at
        return self._shelf.has(key, find_device(step.device))

    def _trace(
        self, identity: str, shape: Shape, device: Device, changes: Mapping[str, Any], choices: Mapping[str, Any]
    ) -> TracedQuestion:
        question = self._traced(identity, shape, device, changes, choices)
        self._note(identity, shape, question)
        return question

    def _traced(
        self, identity: str, shape: Shape, device: Device, changes: Mapping[str, Any], choices: Mapping[str, Any]
    ) -> TracedQuestion:
        from memfit.planner.predict import trace_question
        from memfit.trace.scratch_by_size import ScratchBySize
        from memfit.trace.step import prepare
        from memfit.trace.untraced_copy import untraced_copy_allowed

        if self.several:
            self._while_tracing.enter_context(untraced_copy_allowed())
        like = self._like(identity, device) if device.is_cuda else None

        by_size = self._scratch.setdefault(identity, ScratchBySize())
        sizes = self._facts.nets if self._facts is not None and not changes else None
        job = self._with_settings(changes)
        if self._before_tracing is not None:
            before, self._before_tracing = self._before_tracing, None
            alone = device.is_cuda and all(choices.get(name, DEFAULTS[name]) == DEFAULTS[name] for name in _OF_SETUP)
            before(self, partial(prepare, job, device) if alone else None)
        return trace_question(job, shape, device, scratch_by_size=by_size, sizes=sizes, like=like, **choices)

    def _like(self, identity: str, device: Device) -> TracedQuestion | None:
        """A traced question to the same nets and optimizers on any card: at best one whose traces would be those of
        this card, and that differs in its size alone."""
        kin = identity[: len(identity) // 2]
        names = sorted((name for name in self._known if name.startswith(kin)), key=lambda name: name != identity)
        known = [
            question for name in names for question in chain(*self._known[name].values()) if "cpu" not in question.facts
        ]
        if known:
            return min(known, key=lambda question: not holds_for(question, device))
        return self._shelf.find_like(kin, identity, device) if self._shelf is not None else None

    def _with_settings(self, changes: Mapping[str, Any]) -> Job:
        from memfit.apply.phase_memory import with_settings

        key = _digest(dict(changes))
        if key not in self._changed:
            self._changed[key] = with_settings(self.job, changes)
        return self._changed[key]

    def _exact(self, identity: str, items: int, device: Device) -> TracedQuestion | None:
        question = self._held(identity, items, device)
        return None if question is None else question_on(question, device)

    def _held(self, identity: str, items: int, device: Device) -> TracedQuestion | None:
        """A traced question that holds for a device, as it was traced."""
        known = self._known.setdefault(identity, {}).setdefault(items, [])
        question = next((each for each in known if holds_for(each, device)), None)
        if question is None and self._shelf is not None:
            question = self._shelf.find(f"{identity}.{items}", device)
            known += [question] if question is not None else []
        return question

    def _from_others(self, identity: str, shape: Shape, device: Device) -> TracedQuestion | None:
        sizes = {*self._known.get(identity, {}), *(self._shelf.sizes(identity) if self._shelf is not None else ())}
        known = {items: held for items in sizes if (held := self._held(identity, items, device)) is not None}
        of_card = (device.cublas_workspace_bytes, *sorted((items, id(held)) for items, held in known.items()))
        by_card = self._between.setdefault((identity, shape), {})
        if of_card not in by_card:
            by_card[of_card] = question_between(known, shape, device)
        question = by_card[of_card]
        return None if question is None else question_on(question, device)


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, default=str, sort_keys=True).encode()).hexdigest()[:16]
