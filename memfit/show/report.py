"""Reports of a trace file, a plan or a run: the verdict first, then where memory goes, then the reasons."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from memfit.device.hardware.catalogue import Device, find_device
from memfit.errors import InputError
from memfit.geometry import shape_of
from memfit.job import Job, is_trained
from memfit.loading import load_job
from memfit.plan import MemoryOption, Plan, read_plan
from memfit.planner.checkpoint_writing import with_copy
from memfit.planner.predict import plain_nets, trace_question
from memfit.planner.prediction import Prediction, answer
from memfit.show.footprint_table import footprint_remarks, of_sizes, phase_name, prediction_headline
from memfit.show.page import Page, Section, Table
from memfit.show.plan_table import memory_of
from memfit.show.report_advice import (
    MEANINGS,
    advice_on_plan,
    advice_on_prediction,
    advice_on_run,
    card_sections,
    command_section,
    plan_commands,
)
from memfit.show.report_baseline import untouched_section
from memfit.show.report_curve import curve_section
from memfit.show.report_memory import memory_sections
from memfit.show.report_oom import flight_section
from memfit.show.report_run import run_sections, run_verdict
from memfit.show.run_log import number, process_peaks, whole_lines
from memfit.show.trace_file import read_trace
from memfit.sizes import format_size
from memfit.trace.step import Tracing
from memfit.train.launch.process_guard import is_held
from memfit.train.run_folder import RunFolder
from memfit.wording import counted, precision_words, units_in_words

BEYOND = 4
"""How far a prediction's curve goes, as a multiple of its micro-batch."""
NOT_LOADED = "the job was not loaded (--no-trace)"
TONES = {"yes": "good", "close": "close", "no": "bad"}


def report(path: str | Path, *, trace: bool = True) -> Page:
    """The report of a run's folder, of a plan file or of a trace file (``memfit predict --trace F.npz``).

    Args:
        trace: whether the job, which is code, is loaded and traced again: for memory over the step, and its curves.

    Raises:
        InputError: it is none of these.
    """
    path = Path(path)
    if path.is_dir():
        return run_report(path, trace=trace)
    if path.suffix == ".npz":
        return prediction_report(read_trace(path), trace=trace)
    return plan_report(read_plan(path), path, trace=trace)


def prediction_report(prediction: Prediction, *, trace: bool = True) -> Page:
    """A prediction's footprint over its events."""
    job, problem = _job(prediction.job, prediction.settings) if trace else (None, NOT_LOADED)
    more, why = _curve(lambda: _of_prediction(job, prediction))
    return Page(
        title=f"prediction of {prediction.job}",
        verdict=prediction_headline(prediction).plain.rstrip("."),
        tone=TONES[prediction.footprint.verdict],
        about=_about(prediction),
        sections=[*memory_sections(prediction, _state(job)), *more],
        advice=advice_on_prediction(prediction),
        notes=[
            *([f"Parameters are not split by module: {problem}"] if problem else []),
            *footprint_remarks(prediction.footprint, prediction.engine),
            *why,
        ],
    )


def plan_report(plan: Plan, path: Path = Path("plan.toml"), *, trace: bool = True) -> Page:
    """The report of a plan: its split and options, and its step traced again.

    Args:
        path: the plan's file, which the commands name.
    """
    verdict, tone = plan_verdict(plan)
    memory, notes = _memory(plan) if trace else ([], [f"Memory over the step is not here: {NOT_LOADED}"])
    return Page(
        title=f"plan for {plan.job}",
        verdict=verdict,
        tone=tone,
        about=_plan_facts(plan),
        sections=[plan_section(plan), *memory, command_section(plan_commands(path))],
        notes=notes,
        advice=advice_on_plan(path, tone),
    )


def run_report(path: Path, *, curves: bool = True, trace: bool = True, ended: bool = False) -> Page:
    """A run: what it did against what was predicted, what its ranks saw, and its plan.

    Args:
        curves: whether memory against micro-batch is in it, which takes many traces.
        trace: see ``report``.
        ended: whether it is known that the run has ended, such as by the process that ran it and still holds its
            folder; else whether a process holds the folder says so.

    Raises:
        InputError: the folder is no run's.
    """
    folder = RunFolder(path)
    if not folder.plan.exists():
        raise InputError(
            f"run folder {path}",
            "it has no plan.toml, so it is no run",
            "write the folder that memfit run --out made, a plan.toml or a trace F.npz",
        )
    plan = read_plan(folder.plan)
    lines, ids = whole_lines(path / "metrics.jsonl"), whole_lines(path / "samples.jsonl")
    runs = not ended and any(map(is_held, (folder.path, folder.checkpoints)))
    verdict, tone = run_verdict(path, plan, lines, runs=runs)
    memory, notes = _memory(plan, curves) if trace else ([], [f"Memory over the step is not here: {NOT_LOADED}"])
    failure = flight_section(path / "flight.json")
    commands = command_section(plan_commands(folder.plan))
    sections = [*failure, *run_sections(plan, lines, ids), plan_section(plan), *memory, commands]
    done = (path / "final").is_dir() and any((path / "final").iterdir())
    return Page(
        title=f"run of {plan.job}", verdict=verdict, tone=tone, about=_plan_facts(plan), sections=sections,
        notes=[*([MEANINGS] if memory and lines else []), *notes],
        advice=advice_on_run(path, tone, done=done, runs=runs),
    )  # fmt: skip


def plan_verdict(plan: Plan) -> tuple[str, str]:
    """One line, and its tone."""
    peaks = process_peaks(plan)
    if not peaks:
        return f"{plan.arithmetic} ({plan.unit}); the plan has no predicted memory", "close"
    phase = max(peaks, key=lambda name: peaks[name])
    spare, sizes = plan.budget_bytes - peaks[phase], of_sizes(int(peaks[phase]), plan.budget_bytes)
    peak = f"peak: {phase_name(phase)}, {sizes}"
    if spare < 0:
        return f"Does not fit on {plan.device}: {format_size(-spare)} too much ({peak})", "bad"
    within = (number(plan.phases[phase].get("process_bytes_high")) or 0) <= plan.budget_bytes
    word, tone = ("Fits", "good") if within else ("May not fit", "close")
    what = f"{plan.global_batch} {plan.unit} a window"
    return f"{word} on {plan.device} with {format_size(spare)} to spare: {what} ({peak})", tone


def plan_section(plan: Plan) -> Section:
    """The section with the split, the reasons and the options."""
    useless = [option for option in plan.options if _saves_nothing(option)]
    useful = [option for option in plan.options if not _saves_nothing(option)]
    table = _options_table("Memory-saving options: the change of each phase and the cost", useful)
    idle = _options_table(f"Options that save nothing here: {len(useless)}", useless)
    modes = Table(
        caption=f"What is recomputed: {counted(len(plan.checkpointing), 'module')}",
        columns=("module", "mode"),
        code=("module",),
        rows=sorted(plan.checkpointing.items()),
    )
    return Section(
        title="The plan and its reasons",
        arithmetic=f"{plan.arithmetic} ({plan.unit})",
        reasons=plan.reasons,
        tables=[table] if useful else [],
        folded=[*([idle] if useless else []), *([modes] if plan.checkpointing else [])],
    )


def _saves_nothing(option: MemoryOption) -> bool:
    """Whether it is known that an option which is not applied would free no phase of any bytes."""
    return not option.applied and option.saves_bytes <= 0 and not option.unknown


def _options_table(caption: str, options: Sequence[MemoryOption]) -> Table:
    rows = [
        (
            option.name,
            "✓ applied" if option.applied else "– not applied",
            memory_of(option),
            option.costs,
            option.reason,
        )
        for option in options
    ]
    return Table(
        caption=caption,
        columns=("option", "", "memory", "costs", "reason"),
        text=("memory", "costs", "reason"),
        rows=rows,
    )


def _plan_facts(plan: Plan) -> list[str]:
    time = f"about {plan.step_seconds:.3g} s a window" if plan.step_seconds is not None else "time of a window unknown"
    return [
        f"{plan.job} on {plan.device}",
        f"budget: {format_size(plan.budget_bytes)}",
        plan.arithmetic,
        precision_words(plan.precision, plan.net_kind),
        plan.engine,
        time,
    ]


def _about(prediction: Prediction) -> list[str]:
    device = prediction.device
    trained = sum(net.trainable for net in prediction.nets)
    parameters = sum(net.parameters for net in prediction.nets)
    shape = f" ({prediction.shape})" if prediction.shape.length else ""
    return [
        f"{prediction.job} on {device.name}",
        f"budget: {format_size(device.usable_bytes or 0)}",
        f"micro-batch of {units_in_words(prediction.micro_batch, prediction.unit)}{shape}",
        f"{parameters / 1e6:,.1f} M parameters, {trained / 1e6:,.1f} M of them trained",
    ]


def _memory(plan: Plan, curves: bool = True) -> tuple[list[Section], list[str]]:
    """The sections of the plan's step, traced again, and what is to be said about that; where it cannot be, why."""
    job, problem = _job(plan.job, plan.settings)
    if job is not None:
        count = len(plan.micro_batches[0])
        shape, modes = shape_of(job, plan.micro_batch), plan.checkpointing
        try:
            device = _device(plan)
            question = trace_question(job, shape, device, micro_batches=count, checkpointing=modes, plan=plan)
            prediction = answer(question, plan.job, device)
            untouched = untouched_section(job, plan, prediction)
            sections = [*untouched, *memory_sections(prediction, _state(job)), *card_sections(question, plan)]
            notes = _changes(plan, prediction)
        except Exception as error:  # the job's code is the user's: a report says what it raised
            problem = _first_line(error)
        else:
            more, why = _curve(lambda: _of_plan(job, plan)) if curves else ([], [])
            return [*sections, *more], [*notes, *why]
    return [], [f"Memory over the step is missing because the job could not be traced: {problem}"]


def _curve(make: Callable[[], list[Section]]) -> tuple[list[Section], list[str]]:
    """Memory against micro-batch, or why it is not there."""
    try:
        return make(), []
    except Exception as error:  # as above
        return [], [f"Memory against micro-batch is missing: {_first_line(error)}"]


def _of_plan(job: Job, plan: Plan) -> list[Section]:
    """Memory against micro-batch, up to a rank's whole share."""
    how = Tracing(
        device=_device(plan), implementation=plan.implementation, optimizer_state=plan.optimizer_state,
        average=plan.average,
    )  # fmt: skip
    from memfit.planner.memory_vs_batch import memory_curve  # with the search and scipy, which other reports do without

    points = memory_curve(job, how, _device(plan), sum(plan.micro_batches[0]), plan.micro_batch)
    return [curve_section(points, plan.unit, _device(plan), plan.micro_batch)]


def _of_prediction(job: Job | None, prediction: Prediction) -> list[Section]:
    if job is None:
        return []
    from memfit.planner.memory_vs_batch import memory_curve  # as above

    device, micro = prediction.device, prediction.micro_batch
    points = memory_curve(job, Tracing(device=device), device, BEYOND * micro, micro)
    return [curve_section(points, prediction.unit, prediction.device, prediction.micro_batch)]


def _changes(plan: Plan, prediction: Prediction) -> list[str]:
    """Phases whose peak is no longer the plan's."""
    notes = []
    copies = plan.checkpoint_writing == "asynchronous" and not prediction.device.is_cuda
    footprint = with_copy(prediction.footprint) if copies else prediction.footprint
    for name, phase in footprint.phases.items():
        planned = number(plan.phases.get(name, {}).get("allocated_bytes"))
        if planned is not None and abs(phase.allocated_bytes - planned) > 0.01 * planned:
            sizes = f"{format_size(phase.allocated_bytes)}, where the plan says {format_size(planned)}"
            notes.append(f"Traced again, the peak of {name} is {sizes}: the job or memfit has changed. Plan again.")
    return notes


def _device(plan: Plan) -> Device:
    device = find_device(plan.device)
    return replace(device, usable_bytes=plan.budget_bytes, memory_bytes=device.memory_bytes or plan.budget_bytes)


def _job(name: str, settings: Mapping[str, Any]) -> tuple[Job | None, str]:
    """The job, or why it cannot be loaded."""
    try:
        return load_job(name, dict(settings)), ""
    except Exception as error:  # as above
        return None, _first_line(error)


def _first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), "") or type(error).__name__


def _state(job: Job | None) -> dict[str, dict[str, int]]:
    """Bytes of parameters, frozen parameters and buffers by module path, a shared tensor once."""
    if job is None:
        return {}
    by_module: dict[str, dict[str, int]] = {}
    seen: set[int] = set()
    nets = plain_nets(job)
    for name, net in nets.items():
        trained = is_trained(net)
        named = [(path, parameter.data, "parameters") for path, parameter in net.named_parameters()]
        named += [(path, tensor, "buffers") for path, tensor in net.named_buffers()]
        for path, tensor, category in named:
            if id(tensor) in seen:
                continue
            seen.add(id(tensor))
            entry = by_module.setdefault(f"{name}.{path}".rpartition(".")[0], {})
            category = category if trained else "frozen"
            entry[category] = entry.get(category, 0) + tensor.numel() * tensor.element_size()
    return by_module
