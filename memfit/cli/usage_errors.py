"""Turns click's errors about a command line into memfit's three parts: seen, why, what to write."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from itertools import zip_longest

import click
from click.exceptions import MissingParameter, NoSuchOption

from memfit.errors import InputError

_NEAR, _SAME = 0.65, 0.9
"""How alike an option is that was meant (``difflib``), and one that differs by a letter."""


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
        elsewhere = _verbs_with(error.option_name, context) if context else []
        near = difflib.get_close_matches(error.option_name, options, n=1, cutoff=_SAME if elsewhere else _NEAR)
        why = f"{verb} has no such option"
        if elsewhere:
            why = f"it is an option of memfit {', '.join(elsewhere)}, and not of {verb}"
        write = "leave it out" if elsewhere else help_of
        return InputError(f"option {error.option_name}", why, f"write {near[0]}" if near else write)
    if isinstance(error, MissingParameter) and error.param is not None:
        if isinstance(error.param, click.Argument):
            return InputError(
                verb, f"{error.param.human_readable_name} is missing", f"write {verb} {error.param.human_readable_name}"
            )
        return InputError(verb, f"the option {_longest(error.param)} is missing", f"write {_with_value(error.param)}")
    if isinstance(error, click.BadParameter) and error.param is not None:
        write = f"write {_with_value(error.param)}" if isinstance(error.param.type, click.Choice) else help_of
        return InputError(_longest(error.param), error.message.rstrip("."), write)
    return InputError(verb if " " in verb else "command line", error.format_message().rstrip("."), help_of)


def _longest(parameter: click.Parameter) -> str:
    return max(parameter.opts, key=len)


def _with_value(parameter: click.Parameter) -> str:
    """``--out RUN``, ``--oversized stop|skip``: an option as it is written."""
    kind = parameter.type
    value = "|".join(map(str, kind.choices)) if isinstance(kind, click.Choice) else parameter.metavar
    return f"{_longest(parameter)} {value or kind.name.upper()}"


def _verbs_with(option: str, context: click.Context) -> list[str]:
    """Verbs that have an option; it is no slip of the pen then, unless one of this verb differs by a letter."""
    whole = context.find_root()
    if not isinstance(whole.command, click.Group):
        return []
    verbs = {name: whole.command.get_command(whole, name) for name in whole.command.list_commands(whole)}
    return [name for name, verb in verbs.items() if verb and any(option in parameter.opts for parameter in verb.params)]


def check_options(command: click.Command, arguments: Sequence[str]) -> None:
    """Refuses a single-valued option that is given twice, of which click would silently take the last value, and a
    value that is empty, which would be taken for none.

    Raises:
        InputError: an option is given twice, or without a value.
    """
    valued = {
        name: parameter
        for parameter in command.params
        if isinstance(parameter, click.Option) and not parameter.is_flag
        for name in parameter.opts
    }
    given: set[click.Option] = set()
    for argument, next_one in zip_longest(arguments, arguments[1:], fillvalue=None):
        if argument is None or argument == "--":
            return
        written, equals, value = argument.partition("=")
        parameter = valued.get(written)
        if parameter is None:
            continue
        name = max(parameter.opts, key=len)
        if parameter in given and not parameter.multiple:
            raise InputError(f"{name} twice", f"memfit {command.name} takes one", "write it once")
        given.add(parameter)
        text = value if equals else next_one
        write = f"write {name} {parameter.metavar or parameter.type.name.upper()}, or leave it out"
        if text is None:
            raise InputError(name, "its value is missing", write)
        if not text.strip(" \t\n,"):
            raise InputError(f"{name} {text!r}", "it is empty", write)
