"""Each rank's stream as a strip of text: which ids it is given, and how long and how padded its batches are."""

from __future__ import annotations

import numpy as np
from rich.text import Text

from memfit.audit.strips_data import Picture

LEVELS = " ▁▂▃▄▅▆▇█"
COLUMNS = 64
MOST_RANKS = 8


def strips(picture: Picture) -> list[Text]:
    """Lines of at most 80 characters: a strip of ids for each rank and for all together, then strips over time.

    The height of a character is the part of its ids that is given; full and even strips of "all" mean that every
    sample is seen, an "all" that is no higher than one rank's strip that ranks share the same samples.
    """
    ranks = _shown(len(picture.share))
    lines = [Text(f"{_ranks(picture.world)}: ids 0 to {picture.size - 1}, from left to right", style="bold")]
    lines += [_strip(f"rank {rank}", picture.share[rank], "cyan") for rank in ranks]
    if len(ranks) < len(picture.share):
        lines.append(Text(f"{'':8}… and {len(picture.share) - len(ranks)} more ranks", style="dim"))
    complete = picture.together.min(initial=1.0) >= 1
    lines.append(_strip("all", picture.together, "green" if complete else "red"))
    if picture.length is not None and picture.padding is not None:
        longest = float(np.nanmax(picture.length)) if picture.length.size else 0.0
        legend = f"mean length (full: {longest:,.4g}), then padding (full: all)"
        lines.append(Text(f"steps 0 to {picture.steps - 1}: {legend}"))
        for rank in ranks[:3]:
            lines.append(_strip(f"len {rank}", picture.length[rank] / (longest or 1), "cyan"))
            lines.append(_strip(f"pad {rank}", picture.padding[rank], "yellow"))
    return lines


def _strip(label: str, parts: np.ndarray, style: str) -> Text:
    levels = np.ceil(np.clip(np.nan_to_num(parts), 0, 1) * (len(LEVELS) - 1)).astype(int)
    return Text(f"{label:<8}").append("".join(LEVELS[level] for level in levels), style=style)


def _shown(ranks: int) -> list[int]:
    return list(range(min(ranks, MOST_RANKS)))


def _ranks(world: int) -> str:
    return f"{world} rank{'s' if world > 1 else ''}"
