"""Which rank of several takes which samples of a window."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice

import numpy as np

from memfit.batch.cost import PaddedCost
from memfit.geometry import rank_sizes

SLACK = 0.02
"""A rank may cost so much more than the mean before micro-batches are cut for it."""


def even(ids: Sequence[int], micro_batch: int, ranks: int) -> tuple[tuple[tuple[int, ...], ...], ...]:
    """The samples of each rank's micro-batches, in order, with the sizes that ``geometry.rank_sizes`` gives."""
    remaining = iter(ids)
    return tuple(
        tuple(tuple(islice(remaining, size)) for size in sizes) for sizes in rank_sizes(len(ids), micro_batch, ranks)
    )


def balanced(
    chunks: Sequence[tuple[int, ...]], lengths: np.ndarray, cost: PaddedCost, ranks: int
) -> tuple[tuple[tuple[int, ...], ...], ...]:
    """Micro-batches given to ranks so that they cost alike: the costliest first, each to the rank with least so far.

    While the costliest rank stands out by more than ``SLACK``, its costliest micro-batch of several samples is cut in
    two; a cut adds no padding. (Graham 1969, "longest processing time first", which is within 4/3 of the best.)
    """
    if ranks == 1:
        return (tuple(chunks),)

    def price(chunk: tuple[int, ...]) -> float:
        return float(cost.of(len(chunk), float(lengths[list(chunk)].max())))

    pieces = list(chunks)
    best, best_load = _dealt(pieces, [price(piece) for piece in pieces], ranks)
    while best_load > (1 + SLACK) * sum(map(price, pieces)) / ranks:
        heaviest = max(best, key=lambda share: sum(price(pieces[i]) for i in share))
        divisible = [i for i in heaviest if len(pieces[i]) > 1]
        if not divisible:
            break
        cut = max(divisible, key=lambda i: price(pieces[i]))
        piece = pieces[cut]
        half = (len(piece) + 1) // 2
        tried = [*pieces[:cut], piece[:half], piece[half:], *pieces[cut + 1 :]]
        dealt, load = _dealt(tried, [price(size) for size in tried], ranks)
        if load >= best_load:
            break
        pieces, best, best_load = tried, dealt, load
    return tuple(tuple(pieces[i] for i in share) for share in best)


def _dealt(pieces: Sequence[tuple[int, ...]], prices: Sequence[float], ranks: int) -> tuple[list[list[int]], float]:
    """Indices of pieces for each rank, and the cost of the costliest rank."""
    loads, shares = [0.0] * ranks, [[] for _ in range(ranks)]  # type: list[float], list[list[int]]
    for index in sorted(range(len(pieces)), key=lambda i: (-prices[i], pieces[i])):
        rank = min(range(ranks), key=loads.__getitem__)
        loads[rank] += prices[index]
        shares[rank].append(index)
    return shares, max(loads)
