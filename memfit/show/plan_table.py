"""A plan in the terminal: verdict, split, memory, the reason for each choice, options, and alternatives."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from memfit.planner.cpu_margin import cpu_margin_bytes
from memfit.show.console import make_console
from memfit.show.footprint_table import (
    assumptions,
    footprint_remarks,
    largest_process,
    phase_name,
    place_name,
    verdict_line,
    whole_on_ranks,
)
from memfit.show.mesh_table import show_meshes
from memfit.sizes import format_size
from memfit.wording import precision_words

if TYPE_CHECKING:
    from memfit.device.hardware.catalogue import Device
    from memfit.footprint import Footprint
    from memfit.plan import MemoryOption, Plan
    from memfit.planner.memory_vs_batch import Point
    from memfit.planner.search.engine_search import Answer

NOTICED = 1 << 16
"""Bytes below which a saving is shown as nothing."""
WIDTH = 32
"""Length of a curve's longest bar, in characters."""


def show_answer(answer: Answer, device: Device, out: str | None, console: Console | None = None) -> None:
    """Prints the plan, or what is lacking where nothing fits."""
    console = console or make_console()
    plan = answer.plan
    if plan is None:
        _show_shortfall(answer, device, console)
        return
    assert answer.chosen is not None
    footprint = answer.chosen.footprint
    if footprint.verdict == "close":
        console.print(f"[bold yellow]{verdict_line(footprint, device)}[/]")
        percent = headroom_percent(footprint)
        console.print(f"Warning: this plan may run out of memory; use --headroom {percent}% for a plan with a margin.")
    else:
        console.print(f"[bold green]{verdict_line(footprint, device)}[/]")
    console.print(
        f"[bold]{plan.arithmetic}[/] ({plan.unit}), {precision_words(plan.precision, plan.net_kind)}, {plan.engine}"
    )
    modes = [mode for mode in plan.checkpointing.values() if mode != "keep"]
    counts = ", ".join(f"{modes.count(mode)} {mode}" for mode in dict.fromkeys(modes)) or "nothing recomputed"
    console.print(
        f"{plan.job} on {device.name}, {format_size(plan.budget_bytes)}; {counts}; {_time(plan)}\n",
        style="dim",
    )
    console.print(plan_phase_table(plan))
    _show_margin(device, console)
    console.print()
    for line in assumptions(footprint):
        console.print(line, style="dim")
    for choice, reason in plan.reasons.items():
        console.print(f"{choice}: {reason}", soft_wrap=False)
    console.print(f"learning rate: x {answer.learning_rate.factor:.4g}: {answer.learning_rate.reason}")
    show_meshes(answer.meshes, console)
    _show_options(answer, console)
    _show_alternatives(answer, console)
    if out:
        console.print(f"\nWritten to {out}; run it with: memfit run {out} --out RUN")


def headroom_percent(footprint: Footprint) -> int:
    """Of the device's memory, how much must be left free for a plan whose interval ends within it: where intervals
    reach as far above other needs as above this one."""
    worst = largest_process(footprint)
    return max(math.ceil(100 * (1 - worst.process_bytes / worst.process_bytes_high)), 5)


def plan_phase_table(plan: Plan) -> Table:
    """The predicted peak of each phase, and its part of the budget."""
    table = _table("phase", "allocated", "process", "of budget")
    for name, phase in plan.phases.items():
        table.add_row(
            name,
            format_size(phase["allocated_bytes"]),
            format_size(phase["process_bytes"]),
            f"{phase['process_bytes'] / plan.budget_bytes:.0%}",
        )
    return table


def show_answers(answers: Mapping[str, Answer], devices: Sequence[Device]) -> None:
    """Prints a line for each device: whether the batch fits, how, and how fast."""
    console = make_console()
    table = _table("device", "memory", "plan", "recompute", "process", "a window")
    for device in devices:
        answer = answers[device.key]
        shown = answer.chosen or answer.floor
        takes = max(phase.process_bytes for phase in shown.footprint.phases.values())
        table.add_row(
            device.key,
            format_size(device.usable_bytes or 0),
            shown.geometry.arithmetic() if answer.plan else "does not fit",
            shown.policy if answer.plan else "",
            format_size(takes),
            f"{shown.seconds:.3g} s" if answer.plan and shown.seconds is not None else "-",
        )
    console.print(table)
    ranks = max((answer.plan.ranks for answer in answers.values() if answer.plan), default=1)
    if ranks > 1:
        console.print(f"Each line plans {ranks} equal devices of its name; a plan does not mix devices.")


def show_curve(points: Sequence[Point], device: Device) -> None:
    """Prints memory against micro-batch with a bar for each point, light where it exceeds the device's memory."""
    console = make_console()
    most = max((point.process_bytes for point in points), default=1)
    for policy in dict.fromkeys(point.policy for point in points):
        table = _table("micro-batch", "process", "", title=policy)
        for point in points:
            if point.policy == policy:
                bar = ("█" if point.fits else "░") * max(round(WIDTH * point.process_bytes / most), 1)
                table.add_row(str(point.micro_batch), format_size(point.process_bytes), bar)
        console.print(table)
    console.print(f"░ exceeds the {format_size(device.usable_bytes or 0)} of {device.name}\n")


def _show_shortfall(answer: Answer, device: Device, console: Console) -> None:
    show_meshes(answer.meshes, console)
    floor = answer.floor
    footprint = floor.footprint
    if answer.lengths and not answer.lengths.fits:
        console.print(
            f"[bold red]Nothing fits[/] on {device.name} (tried {floor.policy}, {floor.geometry.arithmetic()})."
        )
        console.print(f"{answer.lengths.reason()}.".capitalize())
        return
    console.print(
        f"[bold red]Nothing fits[/] on {device.name}: the smallest plan needs {format_size(-footprint.headroom_bytes)} "
        f"more ({floor.policy}, {floor.engine}, {floor.geometry.arithmetic()})."
    )
    if footprint.failed_request:
        failed = footprint.failed_request
        console.print(
            f"{phase_name(failed.phase).capitalize()} fails to allocate {format_size(failed.bytes)} "
            f"in {place_name(failed.module, failed.phase)}."
        )
    _show_margin(device, console)
    for line in whole_on_ranks(footprint):
        console.print(line)
    for line in footprint_remarks(footprint, floor.engine) if footprint.limiting_phase == "setup" else ():
        console.print(line)
    phase = footprint.phases[footprint.limiting_phase]
    parts = sorted(phase.categories.items(), key=lambda part: -part[1])
    console.print(
        f"The smallest peak of {phase_name(footprint.limiting_phase)}: "
        + ", ".join(f"{name} {format_size(nbytes)}" for name, nbytes in parts if nbytes)
    )
    if answer.smaller_settings:
        table = _table(
            "setting", "from", "to", "process", "saves", "fits", "changes", title="\nSettings of the job that need less"
        )
        for dial in answer.smaller_settings:
            table.add_row(
                dial.setting, str(dial.now), str(dial.value), format_size(dial.process_bytes),
                format_size(dial.saves_bytes), "yes" if dial.fits else "no", dial.changes,
            )  # fmt: skip
        console.print(table)
        dial = answer.smaller_settings[0]
        console.print(
            f"To apply one, write for example --set {dial.setting}={dial.value}."
            if dial.fits
            else "None of them is enough alone; several --set together may be."
        )
    for suggestion in answer.larger_hardware:
        console.print(f"Or {suggestion}.")


def _show_margin(device: Device, console: Console) -> None:
    """Prints how much of a CPU's budget is reserved for what is no tensor."""
    if left := cpu_margin_bytes(device):
        usable = format_size(device.usable_bytes or 0)
        console.print(f"{format_size(left)} of the {usable} are reserved for Python and autograd's graph.")


def _show_options(answer: Answer, console: Console) -> None:
    assert answer.plan is not None
    for applied, title in ((True, "Applied (change against the plan without it)"), (False, "Not applied")):
        table = _table("option", "each phase", "costs", "why", title=f"\n{title}")
        shown = [option for option in answer.plan.options if option.applied == applied]
        for option in sorted(shown, key=lambda option: -option.saves_bytes):
            reason = f"changes learning; {option.reason}" if option.changes_learning else option.reason
            reason += f" ({option.unknown})" if option.unknown else ""
            table.add_row(option.name, memory_of(option).replace(", ", "\n"), option.costs, reason)
        console.print(table)


def _show_alternatives(answer: Answer, console: Console) -> None:
    assert answer.plan is not None
    if answer.alternatives:
        table = _table("next best", "recompute", "process", "a window", title="\nAlternatives")
        for candidate in answer.alternatives:
            modes = [mode for mode in candidate.modes.values() if mode != "keep"]
            counts = ", ".join(f"{modes.count(mode)} {mode}" for mode in dict.fromkeys(modes)) or "nothing"
            window = f"{candidate.seconds:.3g} s" if candidate.seconds is not None else "-"
            if (
                not candidate.traced
                and candidate.seconds is not None
                and candidate.seconds <= (answer.plan.step_seconds or 0)
            ):
                window = "about the same"
            table.add_row(candidate.geometry.arithmetic(), counts, format_size(candidate.peak), window)
        console.print(table)
    step = answer.next_step
    if step is not None:
        console.print(f"\n{format_size(step.more_bytes)} more memory would save {step.saves:.0%} of the time.")


def memory_of(option: MemoryOption) -> str:
    """``train -2.10 GiB, validate -400 MiB``: the change of each phase, or once where it is the same in all."""
    changed = {phase: nbytes for phase, nbytes in option.saves.items() if abs(nbytes) >= NOTICED}
    words = [f"{phase} {_change(nbytes)}" for phase, nbytes in changed.items()]
    if (
        len(changed) > 1
        and len(changed) == len(option.saves)
        and len({_change(nbytes) for nbytes in changed.values()}) == 1
    ):
        words = [f"all {_change(next(iter(changed.values())))}"]
    unknown = option.unknown.startswith("bytes")
    return ", ".join([*words, "rest unknown" if words else "unknown"] if unknown else words) or "nothing"


def _change(saved: int) -> str:
    return f"{'-' if saved > 0 else '+'}{format_size(abs(saved))}"


def _time(plan: Plan) -> str:
    if plan.step_seconds is None:
        return "time of a window unknown"
    low, high = plan.step_seconds_low, plan.step_seconds_high
    if low is None or high is None:
        return f"about {plan.step_seconds:.3g} s a window"
    return f"about {plan.step_seconds:.3g} s ({low:.3g} to {high:.3g}) a window"


def _table(*columns: str, title: str | None = None) -> Table:
    table = Table(box=None, pad_edge=False, title=title, title_justify="left", title_style="default")
    for name in columns:
        right = name in ("allocated", "process", "of budget", "a window", "memory", "micro-batch", "saves")
        table.add_column(name, justify="right" if right else "left")
    return table
