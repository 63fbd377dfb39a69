"""Functions in the place of a method of one instance."""

from __future__ import annotations

from collections.abc import Callable
from functools import update_wrapper
from inspect import Parameter, signature
from types import MethodType
from typing import Any


def replaced_method(instance: Any, method: Callable[..., Any], function: Callable[..., Any]) -> MethodType:
    """A function, whose first argument is the instance, bound to it, with the name and the signature of a method.

    ``functools.wraps`` alone loses the first parameter: ``inspect.signature`` follows a wrapper to the bound method,
    which has no ``self``, and takes the first parameter off for the binding all the same.
    """
    update_wrapper(function, method)
    try:
        own = signature(method)
    except (TypeError, ValueError):  # written in C
        return MethodType(function, instance)
    bound = Parameter("_instance", Parameter.POSITIONAL_ONLY)
    function.__signature__ = own.replace(parameters=[bound, *own.parameters.values()])  # type: ignore[attr-defined]
    return MethodType(function, instance)
