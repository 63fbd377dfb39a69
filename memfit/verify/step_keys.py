"""Keys of what a window records of its steps: ``net.path``, and where a parameter is stepped several times in a window,
as a judge is that learns more often than its generator, ``net.path, step 2`` and so on."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

_AGAIN = ", step "


def step_key(name: str, steps_before: int) -> str:
    """The key of a parameter's next step.

    Args:
        name: ``net.path``.
        steps_before: steps of it in this window.
    """
    return f"{name}{_AGAIN}{steps_before + 1}" if steps_before else name


def key_before(key: str) -> str | None:
    """The key of the step before; None of the first step."""
    name, _, number = key.partition(_AGAIN)
    return step_key(name, int(number) - 2) if number else None


def at_the_end(by_key: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """By ``net.path``, what each parameter's last step left."""
    return {key.partition(_AGAIN)[0]: value for key, value in by_key.items()}
