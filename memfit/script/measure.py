"""Evaluates a traced script: its Footprint, the lines that hold the peak, and the verdict for every card."""

from __future__ import annotations

import linecache
import os
import time
from collections import defaultdict
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from memfit.device.hardware.catalogue import Device, catalogue
from memfit.device.virtual.redirect import named_cards
from memfit.events import ALLOCATE, CATEGORIES, FAILED, FREE, Trace
from memfit.footprint import Footprint
from memfit.planner.predict import footprint_on
from memfit.script.memory_growth import memory_growth
from memfit.script.options import script_options
from memfit.script.outcome import (
    NO_LATER_SAVE,
    NO_SAVE,
    NO_VALIDATION,
    NOTHING_ON_CARD,
    NOWHERE,
    SCRIPT_ENDED,
    AssumedAnswer,
    CardVerdict,
    Line,
    LineUse,
    MemoryGrowth,
    ScriptError,
    ScriptOption,
    ScriptOutcome,
)
from memfit.script.phase_spans import window_ends
from memfit.script.varying_steps import larger_steps
from memfit.trace.columns import as_trace
from memfit.trace.operator_scratch import with_scratch
from memfit.wording import LONGER, TURNS

if TYPE_CHECKING:
    from memfit.script.run_script import Running
    from memfit.script.tracer import ScriptTracer

MOST_LINES = 40
_ZERO = "deepspeed/runtime/zero/"
"""A part of the paths of the files of DeepSpeed's ZeRO."""


def outcome_of(running: Running, ended: str, error: ScriptError | None) -> ScriptOutcome:
    """Returns the outcome of the run; without a footprint if no window was complete."""
    watch, tracer = running.watch, running.tracer
    world = max(running.request.command.world, running.observations.ranks)
    trace, bare, footprint = None, None, None
    peaks: dict[str, int] = {}
    lines: tuple[LineUse, ...] = ()
    cards: tuple[CardVerdict, ...] = ()
    options: tuple[ScriptOption, ...] = ()
    growth: tuple[MemoryGrowth, ...] = ()
    phases = watch.phases()
    ran = any(label != FAILED for label, _, _ in phases)  # not so where memory ran out while the nets were made
    ran &= ALLOCATE in tracer.kind  # not so where the script trains on the CPU
    if ran and (watch.windows or (error is not None and error.out_of_memory)):
        tracer.averages.categorise(tracer.category, tracer.nbytes, watch.trained_storages, tracer.made_in)
        _name_buffers_of_engines(tracer)
        bare = replace(as_trace(tracer), phases=phases)
        growth = _growth(running, bare, ended, error)
        _note_growing_trainings(running)
        grows = [
            *(f"{each.file}:{each.line}: memory grows with each step" for each in growth),
            *running.observations.grows,
        ]
        bare = replace(bare, assumed=(*bare.assumed, *(f"{line}; {LONGER}" for line in grows)))
        try:
            trace = with_scratch(bare, tracer.call_memory.calls)
        except RuntimeError as problem:  # a call that cannot be made again from its description
            trace = bare
            running.observations.note(f"memory that operators take within a call was not measured ({problem})")
        footprint = _footprint(trace, running.device, world)
        event, peaks = _peak(trace)
        lines = line_uses(trace, tracer.row_lines, event)
        options = _options(running, trace)
        if running.request.every_card and running.device.is_cuda:
            cards = card_verdicts(trace, world)
    return ScriptOutcome(
        ended=ended,
        windows=watch.complete_windows,
        world=world,
        steps=tuple(
            (f"{optimizer.line.file}:{optimizer.line.line}", optimizer.steps) for optimizer in watch.optimizers.values()
        ),
        trace=trace,
        footprint=footprint,
        peak_bytes=peaks,
        lines=lines,
        kept=watch.kept,
        growth=growth,
        options=options,
        cards=cards,
        assumed=_assumed(running),
        not_seen=_not_seen(running, bare, error),
        failed_attempts=len(watch.failures),
        handler=watch.handler,
        lbfgs_iterations=_lbfgs_iterations(running, ended, error),
        walks=tuple(sorted(running.tracer.virtual.assumptions.walks.observed().items())),
        passes_cut=watch.passes_cut,
        loaders=watch.loaders,
        error=error,
        sandboxed=not running.request.unsafe_writes,
        seconds=time.perf_counter() - running.begin,
        processor_seconds=time.process_time(),
        bare=bare,
        row_lines=tuple(tracer.row_lines),
        facts=tuple(sorted(running.facts - {"cudnn_attention_first"})),
    )


def _growth(running: Running, trace: Trace, ended: str, error: ScriptError | None) -> tuple[MemoryGrowth, ...]:
    """What grows with each step, where not all of the training ran."""
    if _is_whole(running, ended, error):
        return ()
    ends = window_ends(running.watch.steps)
    return memory_growth(trace, ends, running.tracer.row_lines, running.device.usable_bytes)


def _note_growing_trainings(running: Running) -> None:
    """Notes trainings each of which leaves more in memory, where not all of them ran."""
    if running.loops.trainings_cut or running.stop.reason:
        for line, nbytes in running.stop.trainings.growing().items():
            running.observations.leave(f"{line.file}:{line.line}", nbytes)


def _is_whole(running: Running, ended: str, error: ScriptError | None) -> bool:
    """Whether all of the training ran."""
    return ended == SCRIPT_ENDED and error is None and not running.observations.training_cut


def _lbfgs_iterations(running: Running, ended: str, error: ScriptError | None) -> int | None:
    """Iterations of LBFGS at most, where all of the training ran and they do not fill its history."""
    histories = running.observations.histories
    return histories.iterations if histories is not None and _is_whole(running, ended, error) else None


def _name_buffers_of_engines(tracer: ScriptTracer) -> None:
    """Categorises what DeepSpeed's ZeRO allocates in a window, by its own lines: buffers in which gradients are reduced
    and weights are gathered.
    """
    for number, category in enumerate(tracer.category):
        if category in (None, "activations") and _ZERO in tracer.line_of(number).library:
            tracer.category[number] = "communication"


def _footprint(trace: Trace, device: Device, world: int) -> Footprint:
    """Returns the footprint: training first, then validation and saving."""
    footprint = footprint_on(trace, device, world)
    order = [name for name in ("train", "validate", "save") if name in footprint.phases]
    return replace(footprint, phases={name: footprint.phases[name] for name in order})


def card_verdicts(trace: Trace, world: int = 1) -> tuple[CardVerdict, ...]:
    """Returns the verdict for every card of the catalogue, from the same kernels as those of the traced card."""
    verdicts = []
    for card in catalogue().values():
        if not card.is_cuda or card.usable_bytes is None:
            continue
        footprint = footprint_on(trace, card, world)
        most = max(phase.process_bytes for phase in footprint.phases.values())
        verdicts.append(
            CardVerdict(
                name=card.key, fits=footprint.fits, verdict=footprint.verdict, process_bytes=most,
                usable_bytes=card.usable_bytes,
            )
        )  # fmt: skip
    return tuple(sorted(verdicts, key=lambda card: card.usable_bytes))


def _counted(trace: Trace) -> np.ndarray:
    """Requested bytes that are alive after each event."""
    sizes = np.where(trace.storage >= 0, trace.nbytes[trace.storage], 0)
    return np.cumsum(np.where(trace.kind == ALLOCATE, sizes, np.where(trace.kind == FREE, -sizes, 0)))


def _peak(trace: Trace) -> tuple[int, dict[str, int]]:
    """Returns (the event with most live bytes, the most live bytes of each phase)."""
    alive = _counted(trace)
    peaks: dict[str, int] = {}
    best = 0
    for label, start, end in trace.phases:
        name = "train" if label == "setup" else label
        if name == FAILED:
            continue
        at = start + int(alive[start:end].argmax()) if end > start else max(start - 1, 0)
        peaks[name] = max(peaks.get(name, 0), int(alive[at]))
        if alive[at] > alive[best]:
            best = at
    return best, peaks


def line_uses(trace: Trace, row_lines: list[Line], event: int) -> tuple[LineUse, ...]:
    """The user's lines by the bytes that they allocated and that are alive just after an event."""
    kind, storage = trace.kind[: event + 1], trace.storage[: event + 1]
    alive = np.zeros(len(trace.nbytes), bool)
    alive[storage[kind == ALLOCATE]] = True
    alive[storage[kind == FREE]] = False
    uses: dict[Line, dict[str, Any]] = {}
    for number in np.flatnonzero(alive).tolist():
        row = int(trace.made_by[number])
        line = row_lines[row] if row < len(row_lines) else NOWHERE
        use = uses.setdefault(line, {"bytes": 0, "tensors": 0, "categories": defaultdict(int), "backward": 0})
        nbytes = int(trace.nbytes[number])
        use["bytes"] += nbytes
        use["tensors"] += 1
        use["categories"][CATEGORIES[trace.category[number]]] += nbytes
        if row < len(trace.operator_part) and trace.parts[trace.operator_part[row]] == "backward":
            use["backward"] += nbytes
    rows = sorted(uses.items(), key=lambda item: -item[1]["bytes"])[:MOST_LINES]
    return tuple(
        LineUse(
            file=line.file, line=line.line, bytes=use["bytes"], tensors=use["tensors"], library_line=line.library,
            in_backward=2 * use["backward"] > use["bytes"], categories=dict(use["categories"]),
            text=linecache.getline(line.file, line.line).strip() if line.file else "",
        )
        for line, use in rows
    )  # fmt: skip


def _options(running: Running, trace: Trace) -> tuple[ScriptOption, ...]:
    watch = running.watch
    steps = [(event, watch.optimizers[number]) for event, number in watch.steps]
    return script_options(trace, watch.held, steps, watch.forward_lines(), _counted(trace))


def _assumed(running: Running) -> tuple[AssumedAnswer, ...]:
    """The values that were assumed in place of data, those of the user's own lines first."""
    lines = running.tracer.lines
    answers = [
        AssumedAnswer(
            where=assumption.where,
            operator="the condition of a loop" if assumption.ends_loop else assumption.operator,
            answer=f"{assumption.answer}; {TURNS}" if assumption.ends_loop else assumption.answer,
            times=assumption.times,
            decides_size=bool(assumption.most) or assumption.doubtful or assumption.ends_loop,
        )
        for assumption in running.tracer.virtual.assumptions
    ]  # fmt: skip
    early = [
        AssumedAnswer(where=held.where, operator=held.text, answer=str(held.answer), times=1, decides_size=False)
        for held in (*running.intervals.early, *running.best_results.improved)
    ]
    own = [answer for answer in answers if lines.is_own(answer.where.rpartition(":")[0])]
    return tuple(early + own + [answer for answer in answers if answer.decides_size and answer not in own])


def _not_seen(running: Running, trace: Trace | None, error: ScriptError | None) -> tuple[str, ...]:
    """What the trace did not reach, or cannot look into."""
    watch = running.watch
    lines = list(running.observations.lines)
    others = named_cards - {0, int(os.environ.get("LOCAL_RANK") or 0)}
    if others:
        cards = ", ".join(f"cuda:{number}" for number in sorted(others))
        lines.append(f"several cards in one process: what {cards} holds was counted on the same card as the rest")
    if watch.windows and running.device.is_cuda and ALLOCATE not in running.tracer.kind:
        lines.append(NOTHING_ON_CARD)
    names = {name for name, _, _ in watch.phases()}
    if "validate" not in names:
        lines.append(NO_VALIDATION)
    if "save" not in names:
        lines.append(NO_LATER_SAVE if watch.saved_in_setup else NO_SAVE)
    if watch.handler and not running.request.asked:
        lines.append(f"what the code at {watch.handler} does where memory fails: memfit trace --device CARD shows it")
    larger = larger_steps(trace, window_ends(watch.steps)) if trace is not None else None
    if larger is not None:
        lines.append(larger)
    stepped = set().union(*(known.weights for known in watch.current() if known.steps))
    for known in watch.current():
        if not known.steps and watch.windows and not known.weights <= stepped:
            lines.append(f"the optimizer of {known.line.file}:{known.line.line} never stepped")
    if running.stop.code_after:
        lines.append(f"what follows the training, from {running.stop.code_after}")
    if error is not None and watch.windows:
        lines.append(f"the rest of the script, after the error: {error.summary.rstrip('.')}")
    return tuple(lines)
