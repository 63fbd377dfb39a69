"""The command line: takes arguments, calls the core and prints the answer. Each verb is one file, imported when it is
used.
"""

import importlib
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import click

from memfit import no_memory
from memfit.cli.device_arguments import with_each_device
from memfit.cli.output import complain, prepare_output
from memfit.cli.script_arguments import joined_scripts
from memfit.cli.usage_errors import check_options, mistake, unknown_verb
from memfit.errors import Exit, InputError, mistake_in_job, mistake_of_leaving
from memfit.frame_room import in_frame_room
from memfit.interruption import was_interrupted
from memfit.printable import shortened

VERBS = {
    "trace": "Predict the memory of your own training script, unmodified, by phase and line.",
    "devices": "List the cards of the catalogue and of this machine.",
    "jobs": "List the built-in jobs and the parameter counts of their nets.",
    "predict": "Predict the memory of training, validation and saving.",
    "plan": "Find the best way to fit a global batch, and say why.",
    "max": "Find the largest micro-batch or the longest sequence that fits a card.",
    "cards": "Compare every card for a job: fit, largest batch, time, energy and cost.",
    "compare": "Compare jobs, settings, plans or traces: bytes, time and differences.",
    "explain": "Explain an out-of-memory error from its text, a log, a summary or a snapshot.",
    "lint": "Find mistakes of memory and batches in a script without running it.",
    "calibrate": "Measure this machine's rates and its card's context, and keep them.",
    "probe": "Run the step on this machine, and compare it with its prediction.",
    "run": "Train a plan inside its memory budget.",
    "export": "Write a plan for torchrun, Accelerate, DeepSpeed, Lightning, Slurm and others.",
    "verify": "Compare one device with many: losses, gradients and weights of each step.",
    "validate": "Validate a run's newest checkpoint, or another.",
    "report": "Write a run, a plan or a trace as one HTML file.",
    "ui": "Write a job as one HTML page with sliders for micro-batch, length and card.",
    "doctor": "Show versions, cards, optional parts and caches, and run a self-test.",
    "audit": "Count the samples that a sampler, loader or loop really gives to each rank.",
}


@contextmanager
def _aborted_quietly() -> Iterator[None]:
    """Makes Ctrl-C click's Abort, without the empty line that click would print."""
    try:
        yield
    except KeyboardInterrupt:
        raise click.Abort from None


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
        if not ctx.resilient_parsing:
            args = joined_scripts(args)
        name, command, rest = super().resolve_command(ctx, args)
        if command is not None and not ctx.resilient_parsing:
            rest = with_each_device(command, rest)
            check_options(command, rest)
        return name, command, rest

    def make_context(self, *arguments: Any, **options: Any) -> click.Context:
        with _aborted_quietly():
            return super().make_context(*arguments, **options)

    def invoke(self, ctx: click.Context) -> Any:
        _check_current_folder()
        with _aborted_quietly():
            return super().invoke(ctx)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Verbs"):
            formatter.write_dl(list(VERBS.items()))


def _check_current_folder() -> None:
    """Refuses a current folder that is gone, with which neither relative paths nor libraries such as MKL work.

    Raises:
        InputError: it was removed.
    """
    try:
        os.getcwd()
    except FileNotFoundError as error:
        raise InputError("the current folder", "it was removed", "change to a folder that is there with cd") from error


def _show_version(ctx: click.Context, option: click.Parameter, asked: bool) -> None:
    if asked and not ctx.resilient_parsing:
        from memfit.cli.doctor import version_lines

        click.echo("\n".join(version_lines()))
        ctx.exit()


@click.group(cls=Verbs, no_args_is_help=False, context_settings={"help_option_names": ["-h", "--help"]})
@click.option(
    "--version", is_flag=True, is_eager=True, expose_value=False, callback=_show_version, help="Show versions and exit."
)
def root() -> None:
    """memfit predicts and plans the memory of PyTorch training: before the run, and without the card."""


@in_frame_room
def main(argv: Sequence[str] | None = None) -> None:
    """Runs one verb and exits with one of ``memfit.errors.Exit``; a user's mistake is one line on standard error."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        prepare_output()
        code = root.main(args=arguments or ["--help"], prog_name="memfit", standalone_mode=False)
        sys.stdout.flush()
    except (click.Abort, KeyboardInterrupt):
        complain("stopped")
        sys.exit(Exit.STOPPED)
    except SystemExit as end:
        if "_MEMFIT_COMPLETE" in os.environ:  # click ends a shell's completion so
            raise
        complain(str(mistake_of_leaving(end)))
        sys.exit(Exit.BAD_INPUT)
    except Exception as error:
        if was_interrupted():
            complain("stopped")
            sys.exit(Exit.STOPPED)
        mistaken = _mistake(error, arguments)
        if mistaken is None:
            raise
        complain(str(mistaken))
        sys.exit(Exit.BAD_INPUT)
    except BaseException as error:
        complain(str(mistake_of_leaving(error)))
        sys.exit(Exit.BAD_INPUT)
    sys.exit(int(code) if isinstance(code, int) else Exit.DONE)


def _mistake(error: Exception, arguments: Sequence[str]) -> InputError | None:
    """Returns the user's mistake that an exception stands for; None if it is a fault of memfit."""
    if isinstance(error, InputError):
        return error
    if isinstance(error, click.ClickException):
        return mistake(error)
    if isinstance(error, OSError) and (place := _named(error, arguments)):
        return InputError(f"the path {shortened(place)!r}", f"{error.strerror}", "write a path that can be read")
    changed = any(argument.startswith("--set") for argument in arguments)
    if not isinstance(error, MemoryError):
        return mistake_in_job(error, changed=changed)
    with suppress(MemoryError):
        if (mistaken := mistake_in_job(error, changed=changed)) is not None:
            return mistaken
    return InputError("this command", no_memory.WHY, no_memory.REMEDY)


def _named(error: OSError, arguments: Sequence[str]) -> str:
    """Returns the path that the system refused, if it is, is part of, or lies in an argument; otherwise empty."""
    path = str(error.filename or "")
    for argument in arguments:
        if len(path) > 1 and path in argument:
            return path
        if len(argument) > 1 and path.startswith(argument):
            return argument
    return ""
