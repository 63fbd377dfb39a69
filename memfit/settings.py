"""Settings: annotated class attributes that ``--set name=value`` changes, checked by their types."""

from __future__ import annotations

import difflib
import inspect
import math
import types
import typing
from typing import Any, ClassVar

from memfit.errors import InputError

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

    @classmethod
    def setting_types(cls) -> dict[str, Any]:
        """Settings and their types, by name, those of the base classes first."""
        found: dict[str, Any] = {}
        for base in reversed(cls.__mro__):
            own = inspect.get_annotations(base)
            hints = typing.get_type_hints(base) if own else {}
            for name in own:
                if not name.startswith("_") and ClassVar not in (hints[name], typing.get_origin(hints[name])):
                    found[name] = hints[name]
        return found

    def settings(self) -> dict[str, Any]:
        """The settings' present values, by name."""
        return {name: getattr(self, name) for name in self.setting_types()}


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
    wants, such = _WANTS.get(kind, (str(kind), "…"))
    raise InputError(f"{name}={value}", f"not {wants}", f"write {name}={such}, say")
