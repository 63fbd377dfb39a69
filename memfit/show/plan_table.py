"""A plan in the terminal: the arithmetic first, then its memory, each choice with its reason, and what is beside."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from memfit.planner.cpu_margin import cpu_margin_bytes
from memfit.show.console import make_console
from memfit.show.footprint_table import assumptions
from memfit.sizes import format_size

if TYPE_CHECKING:
    from memfit.device.hardware.catalogue import Device
    from memfit.plan import MemoryOption, Plan
    from memfit.planner.memory_vs_batch import Point
    from memfit.planner.search.search import Answer

NOTICED = 1 << 16
"""Bytes: a lever that saves less is shown as one that saves nothing."""
WIDTH = 32
"""Characters of the longest bar of a curve."""


def show_answer(answer: Answer, device: Device, out: str | None, console: Console | None = None) -> None:
    """What was found, or the shortfall."""
    console = console or make_console()
    plan = answer.plan
    if plan is None:
        _show_shortfall(answer, device, console)
        return
    console.print(f"[bold green]{plan.arithmetic}[/] ({plan.unit}), {plan.precision}, {plan.engine}")
    modes = [mode for mode in plan.checkpointing.values() if mode != "keep"]
    counts = ", ".join(f"{modes.count(mode)} {mode}" for mode in dict.fromkeys(modes)) or "nothing recomputed"
    console.print(
        f"{plan.job} on {device.name}, {format_size(plan.budget_bytes)}; {counts}; {_time(plan)}\n",
        style="dim",
    )
    table = _table("phase", "allocated", "process", "of budget")
    for name, phase in plan.phases.items():
        table.add_row(
            name,
            format_size(phase["allocated_bytes"]),
            format_size(phase["process_bytes"]),
            f"{phase['process_bytes'] / plan.budget_bytes:.0%}",
        )
    console.print(table)
    _show_margin(device, console)
    console.print()
    if answer.chosen is not None:
        for line in assumptions(answer.chosen.footprint):
            console.print(line, style="dim")
    for choice, reason in plan.reasons.items():
        console.print(f"{choice}: {reason}", soft_wrap=False)
    console.print(f"learning rate: x {answer.learning_rate.factor:.4g}: {answer.learning_rate.reason}")
    _show_levers(answer, console)
    _show_beside(answer, console)
    if out:
        console.print(f"\nWritten to {out}; run it with: memfit run {out} --out RUN")


def show_answers(answers: Mapping[str, Answer], devices: Sequence[Device]) -> None:
    """One line for each device: whether it can run this, how, and how fast."""
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


def show_curve(points: Sequence[Point], device: Device) -> None:
    """Memory against micro-batch, a bar for each point; beyond the device's memory it is drawn light."""
    console = make_console()
    most = max((point.process_bytes for point in points), default=1)
    for policy in dict.fromkeys(point.policy for point in points):
        table = _table("micro-batch", "process", "", title=policy)
        for point in points:
            if point.policy == policy:
                bar = ("█" if point.fits else "░") * max(round(WIDTH * point.process_bytes / most), 1)
                table.add_row(str(point.micro_batch), format_size(point.process_bytes), bar)
        console.print(table)
    console.print(f"░ is over the {format_size(device.usable_bytes or 0)} of {device.name}\n")


def _show_shortfall(answer: Answer, device: Device, console: Console) -> None:
    floor = answer.floor
    found = floor.footprint
    if answer.lengths and not answer.lengths.fits:
        console.print(f"[bold red]Nothing fits[/]: with {floor.policy} and {floor.geometry.arithmetic()} a window fits")
        console.print(answer.lengths.reason())
        return
    console.print(
        f"[bold red]Nothing fits[/] on {device.name}: still {format_size(-found.headroom_bytes)} too much "
        f"with {floor.policy}, {floor.engine} and {floor.geometry.arithmetic()}."
    )
    if found.failed_request:
        console.print(
            f"{found.failed_request.phase} asks for {format_size(found.failed_request.bytes)} "
            f"in {found.failed_request.module or 'the step'} that are not there."
        )
    _show_margin(device, console)
    phase = found.phases[found.limiting_phase]
    parts = sorted(phase.categories.items(), key=lambda part: -part[1])
    console.print(
        f"The floor of {found.limiting_phase}: "
        + ", ".join(f"{name} {format_size(nbytes)}" for name, nbytes in parts if nbytes)
    )
    if answer.smaller_settings:
        table = _table("setting", "from", "to", "process", "saves", "fits", "changes", title="\nThe job's own dials")
        for dial in answer.smaller_settings:
            table.add_row(
                dial.setting, str(dial.now), str(dial.value), format_size(dial.process_bytes),
                format_size(dial.saves_bytes), "yes" if dial.fits else "no", dial.changes,
            )  # fmt: skip
        console.print(table)
        dial = answer.smaller_settings[0]
        console.print(
            f"None is taken unasked: write --set {dial.setting}={dial.value}, say."
            if dial.fits
            else "None of them alone is enough; several --set together may be."
        )
    for way in answer.larger_hardware:
        console.print(f"Or {way}.")


def _show_margin(device: Device, console: Console) -> None:
    """What a plan for a CPU cannot use of its budget."""
    if left := cpu_margin_bytes(device):
        whole = format_size(device.usable_bytes or 0)
        console.print(f"Of the {whole}, {format_size(left)} are left for what is no tensor: Python, autograd's graph.")


def _show_levers(answer: Answer, console: Console) -> None:
    assert answer.plan is not None
    for taken, title in ((True, "Levers that were taken, against the plan without"), (False, "Levers that were left")):
        levers = _table("lever", "each phase", "costs", "why", title=f"\n{title}")
        some = [lever for lever in answer.plan.levers if lever.taken == taken]
        for lever in sorted(some, key=lambda lever: -lever.saves_bytes):
            reason = f"changes learning; {lever.reason}" if lever.changes_learning else lever.reason
            reason += f" ({lever.unknown})" if lever.unknown else ""
            levers.add_row(lever.name, memory_of(lever).replace(", ", "\n"), lever.costs, reason)
        console.print(levers)


def _show_beside(answer: Answer, console: Console) -> None:
    assert answer.plan is not None
    if answer.alternatives:
        table = _table("next best", "recompute", "process", "a window", title="\nBeside it")
        for draft in answer.alternatives:
            modes = [mode for mode in draft.modes.values() if mode != "keep"]
            counts = ", ".join(f"{modes.count(mode)} {mode}" for mode in dict.fromkeys(modes)) or "nothing"
            window = f"{draft.seconds:.3g} s" if draft.seconds is not None else "-"
            if not draft.traced and draft.seconds is not None and draft.seconds <= (answer.plan.step_seconds or 0):
                window = "about the same"
            table.add_row(draft.geometry.arithmetic(), counts, format_size(draft.peak), window)
        console.print(table)
    step = answer.next_step
    if step is not None:
        console.print(f"\n{format_size(step.more_bytes)} more would save {step.saves:.0%} of the time.")


def memory_of(lever: MemoryOption) -> str:
    """``train -2.10 GiB, validate -400 MiB``: what becomes of each phase; where it is the same in all, once."""
    found = {phase: nbytes for phase, nbytes in lever.saves.items() if abs(nbytes) >= NOTICED}
    words = [f"{phase} {_change(nbytes)}" for phase, nbytes in found.items()]
    if len(found) > 1 and len(found) == len(lever.saves) and len({_change(nbytes) for nbytes in found.values()}) == 1:
        words = [f"all {_change(next(iter(found.values())))}"]
    unknown = lever.unknown.startswith("bytes")
    return ", ".join([*words, "rest unknown" if words else "unknown"] if unknown else words) or "nothing"


def _change(saved: int) -> str:
    return f"{'-' if saved > 0 else '+'}{format_size(abs(saved))}"


def _time(plan: Plan) -> str:
    if plan.step_seconds is None:
        return "time of a window unknown"
    low, high = plan.step_seconds_low, plan.step_seconds_high
    between = "" if low is None or high is None else f" ({low:.3g} to {high:.3g})"
    return f"about {plan.step_seconds:.3g} s{between} a window"


def _table(*columns: str, title: str | None = None) -> Table:
    table = Table(box=None, pad_edge=False, title=title, title_justify="left", title_style="default")
    for name in columns:
        right = name in ("allocated", "process", "of budget", "a window", "memory", "micro-batch", "saves")
        table.add_column(name, justify="right" if right else "left")
    return table
