"""Every rank of a world, one after the other in this process."""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Callable, Sequence
from typing import Any

import torch

from memfit.audit.group import CardQuestions, Exchange, as_rank, quiet
from memfit.audit.observe import Drawn, run_rank
from memfit.audit.target import load_target
from memfit.errors import InputError, describe


def simulate(target: str | Callable[..., Any], world: int, size: int | None = None) -> list[Drawn]:
    """What each rank of the world draws in two epochs.

    Where all ranks draw alike, and the target has asked for a CUDA card that is not here, they draw again and are told
    that there is one: on the machine that it is written for it then asks for its rank.

    ``size`` is the number of samples, for streams without an end that do not say it.

    Raises:
        InputError: the target cannot be loaded, or fails.
    """
    questions = CardQuestions(says_yes=False)
    ranks = _simulate(target, world, size, questions)
    if questions.asked and world > 1 and not torch.cuda.is_available() and _all_alike(ranks):
        with contextlib.suppress(InputError):
            return _simulate(target, world, size, CardQuestions(says_yes=True))
    return ranks


def _simulate(target: str | Callable[..., Any], world: int, size: int | None, questions: CardQuestions) -> list[Drawn]:
    exchange = Exchange(world)
    for _ in range(2):
        ranks = []
        for rank in range(world):
            with questions.answered(rank, world):
                ranks.append(_simulate_rank(target, rank, world, exchange, size))
        if not exchange.incomplete:
            break
        exchange.again()
    return ranks


def _all_alike(ranks: Sequence[Drawn]) -> bool:
    """Whether all ranks draw the same samples, as code does that asks for its rank only where there is a card."""
    drawn = [{index for batch in rank.batches for index in batch.ids} for rank in ranks]
    return all(ids == drawn[0] for ids in drawn)


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
        f"it raises {describe(error)} (line {frame.lineno} of {frame.filename})",
        "write a function that runs on a CPU with this rank and world size",
    )
