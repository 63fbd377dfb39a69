"""memfit run: train a plan inside its memory budget."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from typing import TYPE_CHECKING

import click

from memfit.cli.options import json_option, print_json, whole_number
from memfit.errors import Exit

if TYPE_CHECKING:
    from memfit.plan import Plan
    from memfit.train.run_folder import RunFolder

CHILD = "memfit.train.launch.worker"
RANK = "memfit.train.launch.rank_entry"


@click.command("run")
@click.argument("plan")
@click.option("--out", required=True, metavar="RUN", type=click.Path(file_okay=False), help="The run's folder.")
@click.option("--windows", metavar="N", help="Optimizer steps. Default: the job's own number.")
@click.option("--resume", is_flag=True, help="Goes on with a run; with no checkpoint in it, from window 0.")
@click.option("--keep", metavar="N", default="2", show_default=True, help="Checkpoints that stay, the newest ones.")
@click.option(
    "--save-every",
    metavar="SECONDS",
    default="60",
    show_default=True,
    help="Time between checkpoints; 0: after every window. One more is saved at the end and when stopped.",
)
@click.option(
    "--oversized",
    type=click.Choice(["stop", "skip"]),
    default="stop",
    show_default=True,
    help="What a sample does that does not fit alone: stop the run, or be left out and counted.",
)
@click.option(
    "--verify-every",
    metavar="N",
    default="0",
    show_default=True,
    help="Every N windows, what ranks did is done again on one device and compared, beside the training; 0: never.",
)
@click.option("--wandb", is_flag=True, help="Keeps the scalars for Weights & Biases too, offline, under RUN/wandb.")
@json_option
def command(
    plan: str,
    out: str,
    windows: str | None,
    resume: bool,
    keep: str,
    save_every: str,
    oversized: str,
    verify_every: str,
    wandb: bool,
    as_json: bool,
) -> int:
    """Trains PLAN, a file that memfit plan wrote, in a process that cannot take more than the plan's budget.

    A plan for N devices is run by N processes: torchrun starts them on this machine, and starts them again from the
    last checkpoint when one is lost. Over several machines, start memfit run with torchrun on each.
    """
    from memfit.cli.progress import progress
    from memfit.cli.run_monitor import attended, keepers, write_report
    from memfit.device.hardware.process_limits import RANK_BYTES, check_cards, check_ranks
    from memfit.engine.torchrun_env import is_restart, torchrun_env
    from memfit.plan import read_plan, write_plan
    from memfit.train.launch.memory_limit import ENVIRONMENT
    from memfit.train.launch.process_guard import for_child
    from memfit.train.launch.torchrun import restarts, torchrun
    from memfit.train.run_folder import RunFolder, check_same_samples

    count = whole_number("--windows", windows)
    kept, every = whole_number("--keep", keep), whole_number("--save-every", save_every, least=0)
    proofs = whole_number("--verify-every", verify_every, least=0)
    read = read_plan(plan)
    if read.allocator == "expandable_segments":
        os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    folder = RunFolder(out)
    ranks, place = len(read.micro_batches), torchrun_env()
    if place is None and ranks > 1:
        check_cards(f"plan for {ranks} devices", ranks, read.device)
        check_ranks(f"plan for {ranks} devices", ranks, RANK_BYTES + (_peak(read) if read.device == "cpu" else 0))
    resume = resume or (place is not None and is_restart())
    if place is None or place.rank == 0:
        folder.open(resume=resume)
        if resume and folder.plan.exists():
            check_same_samples(read_plan(folder.plan), read, folder.plan)
        write_plan(read, folder.plan)
    start = "resume" if resume else "start"
    arguments = [str(folder.path), str(count or 0), start, str(kept), str(every), oversized, str(proofs)]
    if place is not None:
        os.execve(sys.executable, [sys.executable, "-m", RANK, *arguments], {**os.environ, **ENVIRONMENT})
    with attended(folder, read, keepers(folder, read, wandb)):
        if ranks > 1:
            os.environ.update({**ENVIRONMENT, **for_child()})
            code = torchrun(ranks, RANK, arguments, folder.path, restarts(read))
        else:
            code = _in_a_child([sys.executable, "-m", CHILD, *arguments], {**os.environ, **ENVIRONMENT, **for_child()})
    if code not in (Exit.BAD_INPUT, Exit.FAULT):
        with contextlib.suppress(KeyboardInterrupt), progress("writing the report", quiet=as_json):
            write_report(folder)
    if code < 0:
        click.echo(f"memfit: the training process was killed by signal {-code}; go on with --resume", err=True)
        return Exit.STOPPED
    if code == Exit.DONE:
        show_summary(folder, read.budget_bytes, read.unit, as_json=as_json)
    return code


def _peak(plan: Plan) -> int:
    """Predicted bytes of a rank's tensors in the phase that needs most; 0 where the plan does not tell."""
    return max((int(phase.get("allocated_bytes", 0)) for phase in plan.phases.values()), default=0)


def _in_a_child(arguments: list[str], environment: dict[str, str]) -> int:
    """Runs a process that is told of SIGINT and SIGTERM too, and hears them only once it can end cleanly."""
    child: list[subprocess.Popen[bytes]] = []

    def tell(number: int, frame: object) -> None:
        for one in child:
            one.send_signal(number)

    signals = (signal.SIGINT, signal.SIGTERM)
    signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    before = {number: signal.signal(number, tell) for number in signals}
    try:
        with subprocess.Popen(arguments, env=environment, stdout=sys.stderr) as process:
            child.append(process)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, signals)
            return process.wait()
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, signals)
        for number, handler in before.items():
            signal.signal(number, handler)


def show_summary(folder: RunFolder, budget: int, unit: str, *, as_json: bool) -> None:
    """What a run that is done learnt, took and did, by its lines."""
    from memfit.show.console import make_console
    from memfit.show.run_log import noise_words
    from memfit.sizes import format_size
    from memfit.wording import counted

    lines = [json.loads(line) for line in (folder.path / "metrics.jsonl").read_text().splitlines()]
    first, last = lines[0], lines[-1]
    measured = max(line["measured_process_bytes"] for line in lines)
    noise = next((line["noise_scale"] for line in reversed(lines) if line["noise_scale"] is not None), None)
    summary = {
        "windows": len(lines),
        "loss_first": first["loss"],
        "loss_last": last["loss"],
        "global_batch_asked": last["global_batch_asked"],
        "global_batch_done": max(line["global_batch_done"] for line in lines),
        "noise_scale": noise,
        "predicted_process_bytes": last["predicted_process_bytes"],
        "measured_process_bytes": measured,
        "budget_bytes": budget,
        "seconds": sum(line["seconds"] for line in lines),
    }
    if as_json:
        print_json(summary)
        return
    console, predicted = make_console(), last["predicted_process_bytes"]
    console.print(
        f"[bold green]Done[/]: {counted(len(lines), 'window')} in {summary['seconds']:.1f} s, "
        f"loss {first['loss']:.4f} to {last['loss']:.4f}."
    )
    console.print(
        f"Peak {format_size(measured)} measured, "
        f"{'unknown' if predicted is None else format_size(predicted)} predicted, {format_size(budget)} allowed."
    )
    asked, done = summary["global_batch_asked"], summary["global_batch_done"]
    console.print(f"Global batch {asked} asked, at most {done} done in a window. Written to {folder.path}")
    if words := noise_words(lines, unit):
        console.print(words)
