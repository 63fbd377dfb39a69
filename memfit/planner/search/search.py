"""The search for a plan: the fastest way to run the exact global batch that fits, and what lies beside it.

Free levers come first: they cost neither speed nor learning. Then micro-batch and checkpointing are chosen together, by
time: at a fixed global batch a smaller micro-batch that keeps everything is often faster than a larger one that
recomputes. Last comes room for validation and saving. The answer is traced whole and replayed before it is given.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace

from memfit.apply.phase_memory import with_settings
from memfit.device.hardware.catalogue import Device
from memfit.device.hardware.process_limits import check_fake_ranks
from memfit.errors import InputError
from memfit.geometry import shape_of
from memfit.job import Job, Nets
from memfit.plan import MemoryOption, PhasePolicy, Plan
from memfit.planner.checkpoint_writing import choose_writing
from memfit.planner.cpu_margin import without_cpu_margin
from memfit.planner.lr_scaling import Rate, learning_rate
from memfit.planner.options import options
from memfit.planner.options.offload_options import offload_choices
from memfit.planner.options.option_context import OptionContext
from memfit.planner.options.option_traces import OptionTraces, trace_options
from memfit.planner.predict import BINDING_RANK, default_checkpointing, nets_and_readings, with_precision
from memfit.planner.search.candidate_search import Candidate, CandidateSearch
from memfit.planner.search.engine_choice import Communicates, candidates, communicates
from memfit.planner.search.full_step import ReplayedCandidate, trace_full_step
from memfit.planner.search.traced_job import TracedJob, open_traced_job
from memfit.planner.suggestions.larger_hardware import larger_hardware
from memfit.planner.suggestions.more_memory import MoreMemory, next_step
from memfit.planner.suggestions.smaller_settings import SmallerSetting, smaller_settings
from memfit.planner.timing.time_error import with_time_error
from memfit.planner.variable_length.length_check import EXPANDABLE, LengthCheck, check_lengths
from memfit.sizes import format_size
from memfit.trace.step import Tracing

KEEP = ("checkpointing", "optimizer", "precision", "validation")
"""Choices that a person can leave as the job has them."""
ALLOW = ("precision",)
"""Choices that change what is learned, made only where a person allows them."""
ROUNDS = 3
"""Whole traces whose training is over the budget, before the search gives up."""


@dataclass(frozen=True, kw_only=True)
class Answer:
    """The plan (None where nothing fits), the floor that was reached, and the ways beside it."""

    plan: Plan | None
    chosen: ReplayedCandidate | None
    floor: ReplayedCandidate
    alternatives: tuple[Candidate, ...]
    next_step: MoreMemory | None = None
    lengths: LengthCheck | None = None
    """The first windows, one after the other, where their lengths vary."""
    smaller_settings: tuple[SmallerSetting, ...] = ()
    """Where nothing fits: settings of the job that would make it smaller."""
    larger_hardware: tuple[str, ...] = ()
    """Where nothing fits: what else would, in words."""
    learning_rate: Rate = field(default_factory=lambda: learning_rate(None, 1))
    seconds: float = 0.0


def find_plan(
    job: Job,
    name: str,
    global_batch: int,
    device: Device,
    *,
    micro_batch: int | None = None,
    devices: int = 1,
    engine: str | None = None,
    seed: int = 0,
    keep: Collection[str] = (),
    allow: Collection[str] = (),
    tuned_for: int | None = None,
    rule: str = "none",
) -> Answer:
    """The fastest plan that fits.

    Args:
        micro_batch: fixes that choice, in units.
        devices: data-parallel ranks.
        engine: how nets are put onto them; None: the fastest of those that fit.
        keep: choices that stay as the job has them, of ``KEEP``.
        allow: choices that change what is learned and may be made, of ``ALLOW``.
        tuned_for: the global batch that the job's learning rate was tuned for.
        rule: by which the learning rate should follow, of ``memfit.planner.lr_scaling``.

    Raises:
        InputError: a word of ``keep`` or ``allow`` that is no choice, or of both; an unknown rule; an engine that is
            not known or cannot carry the job.
    """
    begin = time.perf_counter()
    _check_words("--keep", keep, KEEP)
    _check_words("--allow", allow, ALLOW)
    if "precision" in keep and "precision" in allow:
        raise InputError("--keep precision --allow precision", "one says what the other forbids", "write one of them")
    check_fake_ranks(f"--devices {devices}", devices)
    engines = candidates(engine, devices)
    asked = _Asked(
        name=name, global_batch=global_batch, card=device, micro_batch=micro_batch, devices=devices, seed=seed,
        keep=frozenset(keep), rate=learning_rate(tuned_for, global_batch, rule), engine=engines[0],
    )  # fmt: skip
    job = with_settings(job, {"wrapper": "none"})
    best = _of_engines(job, asked, engines)
    if "precision" in allow and job.precision == "fp32" and (device.compute_capability or (8, 0)) >= (8, 0):
        best = _best([best, _of_engines(with_precision(job, "bf16"), asked, engines)])
    return replace(best, seconds=time.perf_counter() - begin)


def _best(answers: Sequence[Answer]) -> Answer:
    """The fastest that fits; where none does, the one that is least over."""
    traced_job = [answer for answer in answers if answer.plan is not None]
    if not traced_job:
        return max(answers, key=lambda answer: answer.floor.footprint.headroom_bytes)
    return min(traced_job, key=lambda answer: (answer.floor.seconds is None, answer.floor.seconds or 0.0))


def _of_engines(job: Job, asked: _Asked, engines: Sequence[str]) -> Answer:
    """The best engine's answer, with the reason.

    Raises:
        InputError: none can carry the job.
    """
    answers: list[Answer] = []
    told: list[str] = []
    for engine in engines:
        first = answers[0].chosen if answers else None
        if first is not None and not first.checkpointing and len(first.geometry.micro_batches[0]) == 1:
            told.append(f"{engine} could only add communication")
            continue
        try:
            answer = _find(job, replace(asked, engine=engine))
        except InputError as error:
            if not answers and engine == engines[-1]:
                raise
            told.append(str(error))
            continue
        answers.append(answer)
        told.append(_told(answer))
    best = _best(answers)
    if best.plan is None or asked.devices == 1:
        return best
    return replace(best, plan=replace(best.plan, reasons={**best.plan.reasons, "engine": "; ".join(told)}))


def _told(answer: Answer) -> str:
    """What an engine comes to, in words."""
    shown = answer.floor
    if answer.plan is None:
        return f"{shown.engine} is {format_size(-shown.footprint.headroom_bytes)} over"
    if shown.seconds is None:
        return f"{shown.engine} fits"
    ranks = f", {shown.communication_seconds:.2g} s of them between ranks" if shown.communication_seconds else ""
    return f"{shown.engine} takes {shown.seconds:.3g} s a window{ranks}"


@dataclass(frozen=True, kw_only=True)
class _Asked:
    """What a plan is asked for."""

    name: str
    global_batch: int
    card: Device
    micro_batch: int | None
    devices: int
    seed: int
    keep: frozenset[str]
    rate: Rate
    engine: str


def _find(job: Job, asked: _Asked) -> Answer:
    """The answer for one precision; optimizers' state is on the host where nothing fits without."""
    answer = _placed(job, asked)
    if answer.plan is not None:
        return answer
    for places in offload_choices(job, asked.card, asked.engine, asked.keep):
        if answer.plan is not None:
            break
        answer = _best([answer, _placed(job, asked, **places)])
    return answer


def _placed(job: Job, asked: _Asked, *, optimizer_state: str = "device", average: str = "device") -> Answer:
    """The answer with optimizers' state and the weights' average in these places."""
    device, keep = without_cpu_margin(asked.card), asked.keep
    nets, by_precision = nets_and_readings(job, "precision")
    own = default_checkpointing(job, nets)
    implementation = "job" if "optimizer" in keep else options.implementation(job, nets, device)
    how = Tracing(
        device=device, implementation=implementation, validation=PhasePolicy(), saving=PhasePolicy(),
        engine=asked.engine, world=asked.devices, rank=BINDING_RANK,
        optimizer_state=optimizer_state, average=average,
    )  # fmt: skip
    told = communicates(asked.engine, nets, device, asked.devices)
    budget = device.usable_bytes or 0
    first = shape_of(job, min(job.longest or 2, -(-asked.global_batch // asked.devices)))
    with open_traced_job(job, how, first) as traced_job:
        for _ in range(ROUNDS):
            drafted = _drafted(traced_job, replace(device, usable_bytes=budget), asked, own, told, nets, by_precision)
            traced_job.pause()
            whole = trace_full_step(
                job, how, device, drafted.best, own,
                may_choose="validation" not in keep, resized=drafted.traced.resized,
            )  # fmt: skip
            found = replace(whole.found, communication_seconds=told(len(whole.found.geometry.micro_batches[0])))
            over = max(-found.footprint.headroom_bytes, budget // 200)
            lengths = None
            if found.footprint.fits:
                lengths = check_lengths(job, how, found.geometry, found.checkpointing, asked.seed)
                if lengths is None or lengths.fits:
                    break
                over = budget // 20
            elif not drafted.best.fits or found.footprint.limiting_phase != "train":
                break
            budget -= over
    how = whole.how
    plan = None
    if found.footprint.fits and (lengths is None or lengths.fits):
        context = OptionContext(
            job=job, device=device, nets=nets, own=own, keep=keep, whole=whole, beside=drafted.traced
        )
        taken = options.describe(context)
        plan = with_time_error(_plan(job, asked, found, own, how, taken), drafted.net_kind, device, drafted.probed)
        writing = choose_writing(found.footprint, device)
        found = replace(found, footprint=writing.footprint)
        if lengths is not None:
            plan = replace(
                plan,
                allocator=lengths.allocator if found.allocator == "default" else found.allocator,
                levers=[*(one for one in plan.levers if one.name != EXPANDABLE), *lengths.levers()],
                reasons={**plan.reasons, "varied lengths": lengths.reason()},
            )
        plan = replace(
            plan,
            checkpoint_writing=writing.how,
            reasons={**plan.reasons, "checkpoint_writing": writing.reason},
            phases={phase: asdict(value) for phase, value in writing.footprint.phases.items()},
        )
    return Answer(
        plan=plan,
        chosen=found if plan else None,
        floor=found,
        alternatives=tuple(drafted.beside),
        next_step=drafted.next_step if plan else None,
        smaller_settings=() if plan else tuple(smaller_settings(job, how, device)),
        larger_hardware=() if plan else tuple(larger_hardware(found.footprint, job.precision, device)),
        learning_rate=asked.rate,
        lengths=lengths,
    )


@dataclass(frozen=True, kw_only=True)
class _Drafted:
    """The best draft, or the lowest where none fits; the three next best; what more memory would bring; and traces."""

    best: Candidate
    beside: list[Candidate] = field(default_factory=list)
    next_step: MoreMemory | None = None
    traced: OptionTraces = field(default_factory=OptionTraces)
    net_kind: str = ""
    probed: bool = False


def _drafted(
    traced_job: TracedJob,
    device: Device,
    asked: _Asked,
    own: Mapping[str, str],
    told: Communicates,
    nets: Nets,
    by_precision: bool,
) -> _Drafted:
    search = CandidateSearch(
        traced_job, device, asked.global_batch, asked.devices,
        fixed=asked.micro_batch, modes=own if "checkpointing" in asked.keep else None,
        communicates=told,
    )  # fmt: skip
    best = search.best()
    if best is None:
        return _Drafted(best=min(search.tried.values(), key=lambda candidate: candidate.peak))
    return _Drafted(
        best=best, beside=search.beside(best), next_step=next_step(search, best),
        traced=trace_options(search, best, nets, by_precision=by_precision),
        net_kind=traced_job.net_kind, probed=search.probed is not None,
    )  # fmt: skip


def _check_words(option: str, words: Collection[str], known: tuple[str, ...]) -> None:
    for word in words:
        if word not in known:
            raise InputError(f"{option} {word}", "no such choice", f"write some of {','.join(known)}")


def _asked_for(asked: _Asked) -> dict[str, str]:
    """Choices that are not the search's, and why they are so."""
    found = {"micro_batch": "--micro-batch asks for it"} if asked.micro_batch is not None else {}
    return found | (
        {"checkpointing": "--keep checkpointing asks for the job's own"} if "checkpointing" in asked.keep else {}
    )


def _plan(
    job: Job, asked: _Asked, chosen: ReplayedCandidate, own: Mapping[str, str], how: Tracing, taken: list[MemoryOption]
) -> Plan:
    geometry, found, device = chosen.geometry, chosen.footprint, asked.card
    return Plan(
        job=asked.name,
        settings=job.settings(),
        device=device.key,
        budget_bytes=device.usable_bytes or 0,
        unit=job.unit,
        global_batch=geometry.global_batch,
        micro_batch=geometry.micro_batch,
        micro_batches=[list(rank) for rank in geometry.micro_batches],
        arithmetic=geometry.arithmetic(),
        engine=how.engine,
        precision=job.precision,
        seed=asked.seed,
        checkpointing=dict(chosen.checkpointing),
        validation=how.validation,
        saving=how.saving,
        implementation=how.implementation,
        allocator=chosen.allocator,
        optimizer_state=how.optimizer_state,
        average=how.average,
        learning_rate=asked.rate.factor,
        warmup_windows=asked.rate.warmup_windows,
        reasons=options.reasons(chosen, own, device, how) | _asked_for(asked),
        levers=taken,
        phases={phase: asdict(value) for phase, value in found.phases.items()},
        step_seconds=chosen.seconds,
    )
