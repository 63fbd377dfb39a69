"""What would get under the floor where nothing fits, beside the job's own dials: more devices, precision, cards."""

from __future__ import annotations

import math

from memfit.device.hardware.catalogue import Device, catalogue
from memfit.footprint import Footprint
from memfit.planner.cpu_margin import budget_for
from memfit.sizes import format_size, parse_size

RANKS = (2, 4, 8, 16)
_SHARED = ("parameters", "gradients", "optimizer", "ema")
"""Categories of which a rank holds its part, where they are sharded."""


def larger_hardware(found: Footprint, precision: str, device: Device) -> list[str]:
    """Each as words; from sums of the floor's categories, not traced."""
    needs = max(phase.process_bytes for phase in found.phases.values())
    over = max(-found.headroom_bytes, 0)
    phase = found.phases[found.limiting_phase]
    shared = sum(phase.categories[name] for name in _SHARED)
    ways = []
    ranks = next((count for count in RANKS if shared - shared // count >= over), None)
    if ranks is not None and found.limiting_phase == "train" and device.is_cuda:
        saves = format_size(shared - shared // ranks)
        ways.append(f"shard over {ranks} devices, which takes {saves} off each: memfit predict --engine fsdp2")
    if precision == "fp32" and phase.categories["activations"] // 2 >= over > 0:
        ways.append("--allow precision: bf16 halves what products leave behind, and changes what is learned")
    cards = [card for card in catalogue().values() if card.is_cuda and (card.usable_bytes or 0) >= needs]
    cards = sorted(cards, key=lambda card: card.usable_bytes or 0)[:3]
    if cards and device.is_cuda:
        ways.append(f"a card that holds {format_size(needs)}: --device " + ", ".join(card.key for card in cards))
    elif device.is_cuda:
        ways.append(f"--memory of {format_size(needs)} or more")
    else:
        unit = "GiB" if needs >= 10 << 30 else "MiB"
        enough = math.ceil(budget_for(needs, device) / parse_size(f"1{unit}"))
        ways.append(f"--memory of {enough} {unit} or more, of which a part is left for what is no tensor")
    return ways
