"""The cards of a run's ranks, compared with the plan's and with each other before the first window."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from memfit.device.hardware.catalogue import find_device
from memfit.errors import InputError
from memfit.plan import Plan
from memfit.planner.cpu_margin import planned_process_bytes
from memfit.sizes import format_size


@dataclass(frozen=True, kw_only=True)
class RankCard:
    """What a rank computes on."""

    name: str
    """As its driver calls it."""
    total_bytes: int
    """Memory of the card, as CUDA reports it."""


def card_of(device: torch.device) -> RankCard | None:
    """The card of this rank; None on a CPU, whose memory the plan's budget limits."""
    if device.type == "cpu":
        return None
    properties = torch.cuda.get_device_properties(device)
    return RankCard(name=properties.name, total_bytes=properties.total_memory)


def check_rank_cards(plan: Plan, cards: Sequence[RankCard | None]) -> None:
    """Refuses unequal cards, unless they hold the plan and it was made for the smallest of them.

    Equal cards with too little memory are left to recovery, which makes micro-batches smaller. A plan's memory and time
    are those of equal cards: each rank gets the same micro-batches and the same part of the nets, and all wait for the
    slowest in every window.

    Args:
        cards: every rank's, in the order of ranks.

    Raises:
        InputError: on every rank, with the cards of all.
    """
    known = [card for card in cards if card is not None]
    if len({card.name for card in known}) < 2:
        return
    smallest = min(known, key=lambda card: card.total_bytes)
    seen, write = f"plan for {plan.device}, {_names(cards)}", f"plan again for the smallest of them, {smallest.name}"
    needed = planned_process_bytes(plan) or 0
    if needed > smallest.total_bytes:
        total = format_size(smallest.total_bytes)
        why = f"the plan needs {format_size(needed)} on each, and {smallest.name} has {total}"
        raise InputError(seen, why, f"{write}, or choose larger cards with CUDA_VISIBLE_DEVICES")
    if not _is_of(plan, smallest):
        why = "the cards are unequal, and a plan is for equal ones: all ranks wait for the slowest"
        raise InputError(seen, why, f"{write}, or choose equal cards with CUDA_VISIBLE_DEVICES")


def _is_of(plan: Plan, card: RankCard) -> bool:
    """Whether a plan was made for such a card: by the catalogue's name, or by its own."""
    if plan.device == card.name.lower().replace(" ", "-"):
        return True
    try:
        return find_device(plan.device).name == card.name
    except InputError:
        return False


def _names(cards: Sequence[RankCard | None]) -> str:
    """The ranks of each card: "ranks 0, 2 on A (24.0 GiB), rank 1 on B (16.0 GiB)"."""
    ranks: dict[RankCard | None, list[str]] = {}
    for rank, card in enumerate(cards):
        ranks.setdefault(card, []).append(str(rank))
    return ", ".join(
        f"rank{'' if len(own) == 1 else 's'} {', '.join(own)} on "
        + ("a CPU" if card is None else f"{card.name} ({format_size(card.total_bytes)})")
        for card, own in ranks.items()
    )
