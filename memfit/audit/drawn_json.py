"""What a rank has drawn as JSON, and back: how the processes of ``memfit audit --real`` hand it to their parent."""

from __future__ import annotations

import json
from collections.abc import Hashable
from dataclasses import asdict, replace
from typing import Any

import numpy as np

from memfit.audit.ids import Batch
from memfit.audit.loader_parts import Declared
from memfit.audit.observe import Drawn


def drawn_to_json(drawn: Drawn) -> str:
    """Ids that are neither text nor whole numbers become text."""
    fields = asdict(replace(drawn, batches=(), declared=replace(drawn.declared, lengths=None)))
    lengths = drawn.declared.lengths
    return json.dumps({
        **fields,
        "batches": [[[_plain_id(sample) for sample in batch.ids], batch.lengths] for batch in drawn.batches],
        "lengths": None if lengths is None else lengths.tolist(),
    })  # fmt: skip


def drawn_from_json(text: str) -> Drawn:
    """What ``drawn_to_json`` wrote."""
    fields: dict[str, Any] = json.loads(text)
    lengths = fields.pop("lengths")
    declared = {**fields.pop("declared"), "lengths": None if lengths is None else np.asarray(lengths)}
    batches = (Batch(ids=tuple(ids), lengths=_tuple(lasting)) for ids, lasting in fields.pop("batches"))
    return Drawn(
        rank=fields["rank"],
        batches=tuple(batches),
        epochs=tuple(fields["epochs"]),
        steps=_tuple(fields["steps"]),
        declared=Declared(**{**declared, "dropped": tuple(declared["dropped"])}),
        endless=fields["endless"],
        once=fields["once"],
    )


def _plain_id(sample: Hashable) -> str | int:
    return sample if isinstance(sample, str | int) else str(sample)


def _tuple(values: list[Any] | None) -> tuple[Any, ...] | None:
    return None if values is None else tuple(values)
