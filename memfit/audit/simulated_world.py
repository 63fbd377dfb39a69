"""Every rank of a world, one after the other in this process."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from typing import Any

from memfit.audit.group import Exchange, as_rank, quiet
from memfit.audit.observe import Drawn, run_rank
from memfit.audit.target import load_target
from memfit.errors import InputError


def simulate(target: str | Callable[..., Any], world: int, size: int | None = None) -> list[Drawn]:
    """What each rank of the world draws in two epochs.

    ``size`` is the number of samples, for streams without an end that do not say it.

    Raises:
        InputError: the target cannot be loaded, or fails.
    """
    exchange = Exchange(world)
    ranks = [_simulate_rank(target, rank, world, exchange, size) for rank in range(world)]
    if exchange.incomplete:
        exchange.again()
        ranks = [_simulate_rank(target, rank, world, exchange, size) for rank in range(world)]
    return ranks


def _simulate_rank(
    target: str | Callable[..., Any], rank: int, world: int, exchange: Exchange, size: int | None
) -> Drawn:
    with as_rank(rank, world, exchange), quiet():
        function = load_target(target) if isinstance(target, str) else target
        try:
            return run_rank(function, rank, world, size)
        except InputError:
            raise
        except Exception as error:
            raise failed(target, rank, world, error) from error


def failed(target: Any, rank: int, world: int, error: Exception) -> InputError:
    """The error of a target that fails: what it raised, and the line where."""
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return InputError(
        f"target {target!r} as rank {rank} of {world}",
        f"it raises {type(error).__name__}: {error} (line {frame.lineno} of {frame.filename})",
        "write a function that runs on a CPU with this rank and world size",
    )
