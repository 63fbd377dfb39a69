"""Plans of published systems for cards they were not published for: python -m bench.cards [--only TEXT] [--json F]

LatentSync's stage 1 at 256 and 512 px with global batches that need several cards upstream, on 24, 40 and 80 GB, and
with free options alone; MuseTalk's stage 1 with its batch of 32 on 48 GB.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from typing import Any

from bench.result_file import add_json_option, target, write_result
from memfit.device.hardware.catalogue import find_device
from memfit.loading import load_job
from memfit.planner.request import PlanRequest
from memfit.planner.search.search import find_plan
from memfit.sizes import format_size

CARDS = ("rtx4090", "a100-40gb", "a100-80gb")
CASES: list[tuple[str, str, int, dict[str, Any]]] = [
    ("latentsync/stage1", "rtx4090", 2, {"micro_batch": 2, "keep": ("checkpointing",)}),
    ("musetalk/stage1", "l40s", 32, {"micro_batch": 32}),
    *(
        (job, card, batch, {})
        for job in ("latentsync/stage1", "latentsync/stage1_512")
        for card in CARDS
        for batch in (6, 16, 64)
    ),
]
"""Job, card, global batch, and what is asked of the plan beside."""


def main() -> int:
    """Prints a line for each plan; 1 where one does not fit or loses a part of its global batch."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="cases whose line has this text, as 512@rtx4090")
    add_json_option(parser)
    asked = parser.parse_args()
    rows: dict[str, Any] = {}
    ok = True
    for job, card, batch, choices in CASES:
        name = f"{job}@{card} {batch}" + "".join(f", {key} {value}" for key, value in choices.items())
        if asked.only in name:
            rows[name] = row = planned(job, card, batch, choices)
            ok &= row["fits"] and sum(row["micro_batches"]) == batch
            print(_line(name, row), flush=True)
    write_result(target(asked.json, complete=not asked.only), {"plans": rows}, packages=["diffusers"])
    return int(not ok)


def planned(job: str, card: str, batch: int, choices: dict[str, Any]) -> dict[str, Any]:
    """One plan's figures."""
    begin = time.process_time()
    answer = find_plan(load_job(job), PlanRequest(name=job, global_batch=batch, device=find_device(card), **choices))
    shown = answer.chosen or answer.floor
    return {
        "fits": answer.plan is not None,
        "micro_batches": list(shown.geometry.micro_batches[0]),
        "arithmetic": shown.geometry.arithmetic(),
        "modes": dict(Counter(shown.checkpointing.values())),
        "process_bytes": {name: phase.process_bytes for name, phase in shown.footprint.phases.items()},
        "usable_bytes": find_device(card).usable_bytes,
        "options": [option.name for option in answer.plan.options if option.applied] if answer.plan else [],
        "step_seconds": shown.seconds,
        "processor_seconds": time.process_time() - begin,
    }


def _line(name: str, row: dict[str, Any]) -> str:
    worst = max(row["process_bytes"].values())
    modes = ", ".join(f"{count} {mode}" for mode, count in row["modes"].items()) or "everything kept"
    return (
        f"{name:52} {row['arithmetic'] if row['fits'] else 'DOES NOT FIT':32} {modes:34} {format_size(worst):>10} of "
        f"{format_size(row['usable_bytes'])}, planned in {row['processor_seconds']:.0f} s of the processor"
    )


if __name__ == "__main__":
    sys.exit(main())
