"""Suggestions where nothing fits: more devices, another precision, a larger card."""

from __future__ import annotations

import math
from dataclasses import replace

from memfit.device.hardware.catalogue import Device, catalogue
from memfit.engine.capabilities import CAPABILITIES
from memfit.footprint import Footprint
from memfit.mesh import MeshShape
from memfit.planner.cpu_margin import budget_for
from memfit.sizes import format_size, parse_size
from memfit.trace.step import Tracing

RANKS = (2, 4, 8, 16)
_SHARED = ("parameters", "gradients", "optimizer", "ema")
"""Categories that sharding splits over ranks."""


def larger_hardware(footprint: Footprint, precision: str, device: Device, how: Tracing) -> list[str]:
    """Suggestions in words, from sums of the smallest footprint's categories; none is traced.

    Args:
        how: the smallest need was traced, on which ranks.
    """
    needs = max(phase.process_bytes for phase in footprint.phases.values())
    over = max(-footprint.headroom_bytes, 0)
    phase = footprint.phases[footprint.limiting_phase]
    shared = sum(phase.categories[name] for name in _SHARED)
    suggestions = []
    ranks = next((count for count in RANKS if shared - shared // count >= over), None)
    if ranks is not None and footprint.limiting_phase == "train" and device.is_cuda:
        suggestions += _sharded(ranks, format_size(shared - shared // ranks), how)
    if precision == "fp32" and phase.categories["activations"] // 2 >= over > 0:
        suggestions.append("use --allow precision: bf16 halves most activations and changes what is learned")
    known = [card for card in catalogue().values() if card.is_cuda and card.validated]
    cards = sorted(
        (card for card in known if (card.usable_bytes or 0) >= needs), key=lambda card: card.usable_bytes or 0
    )[:3]
    if cards and device.is_cuda:
        suggestions.append(f"use a card with {format_size(needs)}: --device " + ", ".join(card.key for card in cards))
    elif device.is_cuda:
        suggestions.append(f"use --memory {format_size(needs)} or more")
    else:
        unit = "GiB" if needs >= 10 << 30 else "MiB"
        enough = math.ceil(budget_for(needs, device) / parse_size(f"1{unit}"))
        suggestions.append(
            f"use --memory {enough}{unit} or more, part of which is reserved for Python and autograd's graph"
        )
    return suggestions


def _sharded(times: int, saves: str, how: Tracing) -> list[str]:
    """What divides the state of a rank by so many; nothing where an engine keeps parts of it whole, as a stage of a
    pipeline does with weights and gradients."""
    if CAPABILITIES[how.engine].whole_state:
        return [f"shard over {times} devices, which saves {saves} on each: memfit predict --engine fsdp2"]
    mesh = how.mesh or MeshShape(dp_shard=how.world)
    if how.engine != "fsdp2" or mesh.pp > 1:
        return []
    more = replace(mesh, dp_shard=times * mesh.dp_shard)
    return [f"shard over {more.world} devices, which saves {saves} on each: memfit predict --mesh {more}"]
