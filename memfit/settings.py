"""Settings: annotated class attributes that ``--set name=value`` changes, checked by their types."""

from __future__ import annotations

import difflib
import inspect
import math
import types
import typing
from typing import Any, ClassVar

from memfit.errors import InputError, describe
from memfit.printable import shortened

_WANTS = {
    int: ("a whole number", "4"),
    float: ("a number", "0.5"),
    bool: ("true or false", "true"),
    str: ("a text", "word"),
}
_TRUE, _FALSE = {"1", "true", "yes", "on"}, {"0", "false", "no", "off"}


class Settings:
    """A class whose annotated public attributes are settings with defaults.

    ``Thing(depth=3)`` or ``Thing(depth="3")`` sets one; a name that does not exist or a value of another type is an
    ``InputError`` that names the nearest setting.
    """

    def __init__(self, **values: Any) -> None:
        kinds = self.setting_types()
        for name, value in values.items():
            if name not in kinds:
                near = difflib.get_close_matches(name, kinds, n=1)
                hint = f"write {near[0]}=…" if near else f"its settings are {', '.join(sorted(kinds)) or 'none'}"
                raise InputError(f"setting {name!r}", f"{type(self).__name__} has no such setting", hint)
            setattr(self, name, _coerce(name, value, kinds[name]))
        for name, kind in kinds.items():
            if not hasattr(self, name):
                write = f"write {name}: {_written(kind)} = {_WANTS.get(kind, ('', '...'))[1]}, say, in the class"
                raise InputError(f"setting {name!r}", f"{type(self).__name__} gives it no default", write)
            if name not in values:
                self._check_default(name, kind)

    def _check_default(self, name: str, kind: Any) -> None:
        """Refuses a default that is not of its type; a text may stand for it as in ``--set``, and None for any."""
        default = getattr(self, name)
        if default is None or is_of_kind(default, kind):
            return
        try:
            _coerce(name, default, kind)
        except Exception as error:
            seen = f"{type(self).__name__}.{name} = {shortened(repr(default))}"
            write = "write such a default, or another annotation"
            raise InputError(seen, f"its annotation says {kind_in_words(kind)}", write) from error

    @classmethod
    def setting_types(cls) -> dict[str, Any]:
        """Settings and their types, by name, those of the base classes first."""
        by_name: dict[str, Any] = {}
        for base in reversed(cls.__mro__):
            own = inspect.get_annotations(base)
            hints = _hints(base) if own else {}
            for name in own:
                if not name.startswith("_") and ClassVar not in (hints[name], typing.get_origin(hints[name])):
                    by_name[name] = hints[name]
        return by_name

    def settings(self) -> dict[str, Any]:
        """The settings' present values, by name."""
        return {name: getattr(self, name) for name in self.setting_types()}


def _hints(kind: type) -> dict[str, Any]:
    try:
        return typing.get_type_hints(kind)
    except Exception as error:
        seen, write = f"the annotations of {kind.__name__}", "import what they name, or take the annotation out"
        raise InputError(seen, describe(error), write) from error


def is_of_kind(value: Any, kind: Any) -> bool:
    """Whether a value is of an annotated type: a whole number will do for a float, and no text for a number."""
    origin, options = typing.get_origin(kind), typing.get_args(kind)
    if kind is Any:
        return True
    if origin in (typing.Union, types.UnionType):
        return any(is_of_kind(value, option) for option in options)
    if origin is typing.Literal:
        return value in options
    if kind is float:
        return isinstance(value, int | float) and not isinstance(value, bool)
    if kind is int:
        return isinstance(value, int) and not isinstance(value, bool)
    expected = origin or kind
    if isinstance(expected, type) and not isinstance(value, expected):
        return False
    return origin is not tuple or options[-1] is not ... or all(is_of_kind(item, options[0]) for item in value)


def kind_in_words(kind: Any) -> str:
    """A type as people say it: ``a number or none``."""
    if kind is type(None):
        return "none"
    options = typing.get_args(kind)
    if typing.get_origin(kind) in (typing.Union, types.UnionType):
        return " or ".join(kind_in_words(option) for option in options)
    if typing.get_origin(kind) is typing.Literal:
        return f"one of {', '.join(map(str, options))}"
    return _WANTS.get(kind, (_written(kind), ""))[0]


def _written(kind: Any) -> str:
    return kind.__name__ if isinstance(kind, type) and not typing.get_args(kind) else str(kind).replace("typing.", "")


def _coerce(name: str, value: Any, kind: Any) -> Any:
    """The value as ``kind`` (int, float, bool, str, Literal, ``X | None``); text is read as people write it."""
    origin, options = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        if value is None or (value == "none" and str not in options):
            return None
        return _coerce(name, value, next(option for option in options if option is not type(None)))
    if origin is typing.Literal:
        for option in options:
            if value == option or str(value) == str(option):
                return option
        raise InputError(f"{name}={value}", "not one of its values", f"write one of {', '.join(map(str, options))}")
    if kind is bool and isinstance(value, str) and value.lower() in _TRUE | _FALSE:
        return value.lower() in _TRUE
    if kind is bool and isinstance(value, bool):
        return value
    if kind in (int, float, str) and not isinstance(value, bool):
        try:
            read = kind(value)
        except (TypeError, ValueError):
            read = math.nan
        if kind is str or (math.isfinite(read) and (kind is float or float(value) == read)):
            return read
    if (origin or kind) in (list, tuple):
        return _items(name, value, origin or kind, options)
    if not isinstance(value, str) and is_of_kind(value, kind):
        return value
    wants, such = _WANTS.get(kind, (_written(kind), "…"))
    raise InputError(f"{name}={value}", f"not {wants}", f"write {name}={such}, say")


def _items(name: str, value: Any, kind: type, options: tuple[Any, ...]) -> Any:
    """A list or tuple, of ``3,4,5`` or of what has items already."""
    items = [part.strip() for part in value.split(",") if part.strip()] if isinstance(value, str) else value
    if not isinstance(items, list | tuple):
        raise InputError(f"{name}={value}", "not a list", f"write {name}=3,4,5, say")
    inner = options[0] if options else str
    return kind(_coerce(name, item, inner) if isinstance(item, str) or options else item for item in items)
