"""The page of ``memfit ui``: a job's derived steps in one HTML file, which answers for settings without a server."""

from __future__ import annotations

import base64
import gzip
import json
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from memfit.atomic_file import write_atomic
from memfit.device.hardware.catalogue import Device, catalogue, nccl_bytes
from memfit.errors import unwritable
from memfit.events import ALLOCATE, CATEGORIES, FREE, Trace
from memfit.planner.derived_steps import CardGroup, start_kind
from memfit.planner.job_facts import JobFacts
from memfit.planner.step_range import StepRange
from memfit.replay.cudnn_workspaces import optional_storages
from memfit.replay.margins import WITHOUT_WORKSPACES, margin_of
from memfit.show.page import environment, own_file, script_hash
from memfit.show.report_memory import LAYERS
from memfit.wording import precision_words

SCRIPTS = ("caching_allocator.js", "derived_step.js", "settings_page.js")


def write_settings_page(
    path: str | Path, facts: JobFacts, name: str, pairs: Sequence[str], groups: Sequence[CardGroup], ranks: int = 1,
    repeat: Mapping[str, str] | None = None,
) -> None:  # fmt: skip
    """Writes the page.

    Args:
        name, pairs: the job and its settings, as the command line has them; of a script, its command.
        repeat: options by card with which a command repeats its memory, such as ``--headroom 1GiB``.
        groups: the job's steps; the page starts on the first one's first card.

    Raises:
        InputError: the file cannot be written, or jinja2 is not installed.
    """
    from markupsafe import Markup

    data = page_data(facts, name, pairs, groups, ranks, repeat)
    packed = base64.b64encode(gzip.compress(json.dumps(data, separators=(",", ":"), allow_nan=False).encode(), mtime=0))
    scripts = [own_file(script) for script in SCRIPTS]
    net_kind = next((step["net_kind"] for step in data["steps"]), "")
    html = environment().from_string(own_file("settings_page.html")).render(
        title=f"settings of {name}", about=_about(facts, name, pairs, net_kind), layers=LAYERS,
        css=Markup(own_file("report.css") + own_file("settings_page.css")), data=Markup(packed.decode()),
        scripts=[Markup(script) for script in scripts], script_hashes=" ".join(map(script_hash, scripts)),
    )  # fmt: skip
    try:
        write_atomic(path, html)
    except OSError as error:
        raise unwritable(f"--out {path}", error) from error


def page_data(
    facts: JobFacts, name: str, pairs: Sequence[str], groups: Sequence[CardGroup], ranks: int = 1,
    repeat: Mapping[str, str] | None = None,
) -> dict[str, Any]:  # fmt: skip
    """What the page's scripts read; arguments as of ``write_settings_page``."""
    steps = _Steps()
    kinds = [
        [
            {
                "checkpoint": derived.kind.checkpoint, "accumulated": derived.kind.accumulated,
                "world": derived.kind.world, "length": derived.kind.length, "refused": derived.refused,
                "ranges": [steps.range_json(item) for item in derived.ranges],
            }
            for derived in group.kinds
        ]
        for group in groups
    ]  # fmt: skip
    seen = {derived.kind.checkpoint for group in groups for derived in group.kinds}
    lengths = sorted(
        {derived.kind.length for group in groups for derived in group.kinds if derived.kind.length is not None}
    )
    arguments = shlex.join([name, *(word for pair in pairs for word in ("--set", pair))]) if facts.precision else name
    return {
        "unit": facts.unit,
        "arguments": arguments,
        "script": not facts.precision,
        "categories": list(CATEGORIES),
        "layers": list(LAYERS),
        "lengths": [*lengths] or [None],
        "checkpoints": [mode for mode in ("none", "all") if mode in seen],
        "worlds": [1, ranks] if ranks > 1 else [1],
        "cards": _cards(groups, arguments, repeat or {}, is_script=not facts.precision),
        "groups": kinds,
        "steps": steps.json,
        "start": {
            "card": groups[0].cards[0].key, "items": 1, "length": lengths[-1] if lengths else None, "accumulate": 1,
            "checkpoint": start_kind(facts).checkpoint, "world": 1,
        },
    }  # fmt: skip


class _Steps:
    """Steps as JSON, each sequence of events once."""

    def __init__(self) -> None:
        self.json: list[dict[str, Any]] = []
        self._known: dict[tuple[Any, ...], int] = {}

    def range_json(self, item: StepRange) -> dict[str, Any]:
        """A range of items; storages with the same bytes at both ends share a row."""
        pairs, which = np.unique(np.stack([item.trace.nbytes, item.high_bytes]), axis=1, return_inverse=True)
        return {
            "low": item.low, "high": item.high, "step": self._number(item.trace),
            "low_bytes": pairs[0].tolist(), "high_bytes": pairs[1].tolist(), "which": which.reshape(-1).tolist(),
        }  # fmt: skip

    def _number(self, trace: Trace) -> int:
        columns = (trace.kind, trace.storage, trace.operator, trace.made_by, trace.category, trace.stream,
                   trace.operator_name, trace.operator_module)  # fmt: skip
        key = (*(column.tobytes() for column in columns), trace.phases, trace.names, trace.modules, trace.net_kind)
        if key not in self._known:
            self._known[key] = len(self.json)
            self.json.append(step_json(trace))
        return self._known[key]


def step_json(trace: Trace) -> dict[str, Any]:
    """A step's events, without bytes."""
    signs = np.where(trace.kind == ALLOCATE, 1, np.where(trace.kind == FREE, -1, 0))
    pairs = np.stack([trace.operator_module[trace.operator], trace.operator_name[trace.operator]])
    places, place = np.unique(pairs, axis=1, return_inverse=True)
    margin = margin_of(trace.net_kind)
    return {
        "codes": (signs * (trace.storage.astype(np.int64) + 1)).tolist(),
        "category": trace.category.tolist(),
        "streams": trace.stream.tolist() if trace.stream.any() else None,
        "phases": [list(phase) for phase in trace.phases],
        "places": [[trace.modules[module], trace.names[name]] for module, name in places.T.tolist()],
        "place": place.reshape(-1).tolist(),
        "margin": {
            "low": margin.low, "high": margin.high, "runs": margin.runs,
            "without_workspaces": margin_of(WITHOUT_WORKSPACES).high,
        },
        "optional": sorted(optional_storages(trace)),
        "net_kind": trace.net_kind,
    }  # fmt: skip


def _cards(
    groups: Sequence[CardGroup], arguments: str, repeat: Mapping[str, str], *, is_script: bool
) -> list[dict[str, Any]]:
    """Cards with steps, and those without, which say how to get them."""
    cards = {
        card.key: _card(card, number) | {"options": repeat.get(card.key, "")}
        for number, group in enumerate(groups)
        for card in group.cards[::-1]
    }
    for card in catalogue().values():
        if card.is_cuda and card.usable_bytes is not None and card.key not in cards:
            device = f"--device {card.key}"
            words = f"{device} -- {arguments}" if is_script else f"{arguments} {device}"
            why = f"Not traced, since it runs other kernels: memfit ui {words}"
            cards[card.key] = _card(card, None) | {"why": why}
    return sorted(cards.values(), key=lambda card: (card["group"] is None, card["usable"], card["key"]))


def _card(card: Device, group: int | None) -> dict[str, Any]:
    context = [card.context_low or 0, card.context_bytes or 0, card.context_high or 0]
    return {
        "key": card.key, "name": card.name, "usable": card.usable_bytes, "free": card.free_bytes, "context": context,
        "nccl": list(nccl_bytes(card)), "group": group, "why": "", "options": "",
    }  # fmt: skip


def _about(facts: JobFacts, name: str, pairs: Sequence[str], net_kind: str) -> list[str]:
    if not facts.precision:  # a script, of which only its steps are known
        return [name]
    parameters, trained = (sum(getattr(size, what) for size in facts.nets) for what in ("parameters", "trainable"))
    counts = f"{parameters / 1e6:,.1f} M parameters, {trained / 1e6:,.1f} M of them trained"
    return [" ".join([name, *pairs]), counts, precision_words(facts.precision, net_kind)]
