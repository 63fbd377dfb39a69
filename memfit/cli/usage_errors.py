"""Turns click's errors about a command line into memfit's three parts: seen, why, what to write."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence

import click
from click.exceptions import MissingParameter, NoSuchOption

from memfit.errors import InputError


def unknown_verb(name: str, verbs: Iterable[str]) -> InputError:
    """The error for an unknown verb; it names the nearest verb."""
    verbs = list(verbs)
    near = difflib.get_close_matches(name, verbs, n=1, cutoff=0.5)
    return InputError(
        f"verb {name!r}", f"not one of {', '.join(verbs)}", f"write memfit {near[0]}" if near else "see memfit --help"
    )


def mistake(error: click.ClickException) -> InputError:
    """Converts an error of click."""
    context = getattr(error, "ctx", None)
    verb = context.command_path if context else "memfit"
    help_of = f"see {verb} --help"
    if isinstance(error, NoSuchOption):
        options = [name for parameter in context.command.params for name in parameter.opts] if context else []
        near = difflib.get_close_matches(error.option_name, options, n=1, cutoff=0.65)
        return InputError(
            f"option {error.option_name}", f"{verb} has no such option", f"write {near[0]}" if near else help_of
        )
    if isinstance(error, MissingParameter) and error.param is not None:
        if isinstance(error.param, click.Argument):
            return InputError(
                verb, f"{error.param.human_readable_name} is missing", f"write {verb} {error.param.human_readable_name}"
            )
        name = max(error.param.opts, key=len)
        return InputError(verb, f"the option {name} is missing", f"write {name} {error.param.metavar or ''}")
    if isinstance(error, click.BadParameter) and error.param is not None:
        kind = error.param.type
        name = max(error.param.opts, key=len)
        write = f"write {name} {'|'.join(map(str, kind.choices))}" if isinstance(kind, click.Choice) else help_of
        return InputError(name, error.message.rstrip("."), write)
    return InputError(verb, error.format_message().rstrip("."), help_of)


def check_given_once(command: click.Command, arguments: Sequence[str]) -> None:
    """Refuses a single-valued option that is given twice; click would silently take the last value.

    Raises:
        InputError: an option is given twice.
    """
    single = {
        name: parameter
        for parameter in command.params
        if isinstance(parameter, click.Option) and not parameter.multiple and not parameter.is_flag
        for name in parameter.opts
    }
    given: set[str] = set()
    for argument in arguments:
        if argument == "--":
            return
        parameter = single.get(argument.partition("=")[0])
        if parameter is not None and parameter.name is not None:
            if parameter.name in given:
                name = max(parameter.opts, key=len)
                raise InputError(f"{name} twice", f"memfit {command.name} takes one", "write it once")
            given.add(parameter.name)
