"""The command line: ``memfit VERB``. One thin file for each verb, imported only when its verb is asked for."""

import atexit
import gc
import importlib
import sys
from collections.abc import Sequence
from typing import Any

import click

from memfit.cli.output import complain, prepare_output
from memfit.cli.usage_errors import check_given_once, mistake, unknown_verb
from memfit.errors import Exit, InputError, mistake_in_job
from memfit.printable import shortened

VERBS = {
    "trace": "Your own training script, unmodified: its memory by phase and line, on every card.",
    "devices": "The catalogue of cards, and what is in this machine.",
    "jobs": "Built-in jobs and their parameter counts, net by net.",
    "predict": "Does it fit? The memory of training, validation and saving.",
    "plan": "The best way to fit a global batch, and why.",
    "max": "The largest micro-batch or the longest sequence that fits, per card.",
    "cards": "Every card for a job: fit, largest batch, time, energy and cost.",
    "compare": "Jobs, settings, plans or traces side by side: bytes, time, what differs.",
    "explain": "Why did it run out of memory? From an error, log, summary or snapshot.",
    "lint": "Mistakes of memory and batches in a script, found without running it.",
    "calibrate": "This machine's rates, and its card's context, measured once and kept.",
    "probe": "The step really run on this machine, beside its prediction.",
    "run": "Train a plan inside its memory budget.",
    "export": "A plan as DeepSpeed, Accelerate or torchrun read it.",
    "verify": "One device against many, step by step: losses, gradients, weights.",
    "validate": "Validate a run's newest checkpoint, or another, by hand.",
    "report": "A run, a plan or a trace as one HTML file.",
    "doctor": "Versions, cards, optional parts, caches and a self-test of this installation.",
    "audit": "Count what a sampler, loader or loop really gives to each rank.",
}


class Verbs(click.Group):
    """A group whose commands live in ``memfit.cli.VERB`` and are imported on first use."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(VERBS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in VERBS:
            return None
        module = importlib.import_module(f"memfit.cli.{cmd_name}")
        command: click.Command = module.command
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args[0] not in VERBS and not args[0].startswith("-") and not ctx.resilient_parsing:
            raise unknown_verb(args[0], VERBS)
        resolved = super().resolve_command(ctx, args)
        if resolved[1] is not None and not ctx.resilient_parsing:
            check_given_once(resolved[1], resolved[2])
        return resolved

    def invoke(self, ctx: click.Context) -> Any:
        """Runs the verb. Ctrl-C is click's Abort, for which click writes no empty line."""
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            raise click.Abort from None

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Verbs"):
            formatter.write_dl(list(VERBS.items()))


def _show_version(ctx: click.Context, option: click.Parameter, asked: bool) -> None:
    if asked and not ctx.resilient_parsing:
        from memfit.cli.doctor import version_lines

        click.echo("\n".join(version_lines()))
        ctx.exit()


@click.group(cls=Verbs, no_args_is_help=False, context_settings={"help_option_names": ["-h", "--help"]})
@click.option(
    "--version", is_flag=True, is_eager=True, expose_value=False, callback=_show_version, help="Versions, and exit."
)
def root() -> None:
    """memfit fits a PyTorch training run into the memory there is: it answers before the run, without the card."""


def main(argv: Sequence[str] | None = None) -> None:
    """Runs one verb and exits with one of ``memfit.errors.Exit``; a user's mistake is one line on standard error.

    The garbage that is left at the end goes with the process: to collect it took an eighth of a prediction.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        atexit.register(gc.freeze)
        prepare_output()
        code = root.main(args=arguments or ["--help"], prog_name="memfit", standalone_mode=False)
        sys.stdout.flush()
    except (click.Abort, KeyboardInterrupt):
        complain("stopped")
        sys.exit(Exit.STOPPED)
    except SystemExit as end:
        seen, why = "the job's code", f"it ended the process: sys.exit({end.code!r})"
        complain(str(InputError(seen, why, "return from it, or raise an exception that says what is wrong")))
        sys.exit(Exit.BAD_INPUT)
    except Exception as error:
        mistaken = _mistake(error, arguments)
        if mistaken is None:
            raise
        complain(str(mistaken))
        sys.exit(Exit.BAD_INPUT)
    sys.exit(int(code) if isinstance(code, int) else Exit.DONE)


def _mistake(error: Exception, arguments: Sequence[str]) -> InputError | None:
    """The user's mistake that an exception stands for; None for a fault of memfit."""
    if isinstance(error, InputError):
        return error
    if isinstance(error, click.ClickException):
        return mistake(error)
    if isinstance(error, OSError) and (place := _named(error, arguments)):
        return InputError(f"the path {shortened(place)!r}", f"{error.strerror}", "write a path that can be read")
    return mistake_in_job(error, changed=any(argument.startswith("--set") for argument in arguments))


def _named(error: OSError, arguments: Sequence[str]) -> str:
    """The path that the system refused, where it is an argument, a part of one, or lies in one; else empty."""
    path = str(error.filename or "")
    for argument in arguments:
        if len(path) > 1 and path in argument:
            return path
        if len(argument) > 1 and path.startswith(argument):
            return argument
    return ""
