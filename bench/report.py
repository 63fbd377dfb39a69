"""python bench/report.py [EVENTS]: size of the report of a long step, and the time until Chromium has drawn it.

The trace is a real job's (a DiT of 24 blocks), repeated window after window until it has EVENTS events (60,000). Bounds
of the project: under 8 MB, open in under 3 s.
"""

from __future__ import annotations

import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from browser import browser, load, missing

from memfit.device.catalogue import find_device
from memfit.events import Trace
from memfit.geometry import shape_of
from memfit.loading import load_job
from memfit.planner.predict import Prediction, predict
from memfit.show.page import write_page
from memfit.show.report import prediction_report

MEGABYTES, SECONDS = 8.0, 3.0


def traced(events: int) -> Prediction:
    """A prediction whose trace has at least so many events."""
    spec = f"{Path(__file__).parents[1]}/tests/nets.py:Transformer"
    job = load_job(spec, {"depth": "24"})
    found = predict(job, spec, shape_of(job, 640), find_device("rtx4090"), micro_batches=2)
    return replace(found, settings={"depth": 24}, trace=repeated(found.trace, events))


def repeated(trace: Trace, events: int) -> Trace:
    """The trace with its second window again and again, each time with storages of its own."""
    name, start, end = trace.phases[2]
    own = np.unique(trace.storage[start:end])
    again = -(-max(events - len(trace.kind), 0) // (end - start))
    fresh = np.arange(trace.nbytes.size + 1, dtype=np.int32)
    kinds, storages, operators, phases = [trace.kind[:end]], [trace.storage[:end]], [trace.operator[:end]], list(trace.phases[:3])
    taken = [np.arange(trace.nbytes.size)]
    for turn in range(again):
        at = trace.nbytes.size + turn * len(own)
        fresh[own] = at + np.arange(len(own))
        balanced = np.isin(trace.storage[start:end], _made_and_freed(trace, start, end))
        kinds.append(trace.kind[start:end][balanced])
        storages.append(fresh[trace.storage[start:end]][balanced])
        operators.append(trace.operator[start:end][balanced])
        begin = phases[-1][2]
        phases.append((name, begin, begin + int(balanced.sum())))
        taken.append(own)
    columns = np.concatenate(taken)
    return replace(
        trace, kind=np.concatenate(kinds), storage=np.concatenate(storages), operator=np.concatenate(operators), phases=tuple(phases),
        nbytes=trace.nbytes[columns], category=trace.category[columns], stream=trace.stream[columns], made_by=trace.made_by[columns],
    )  # fmt: skip


def _made_and_freed(trace: Trace, start: int, end: int) -> np.ndarray:
    storage, kind = trace.storage[start:end], trace.kind[start:end]
    return np.intersect1d(storage[kind == 1], storage[kind == -1])


def main(events: int) -> int:
    """Prints what was measured; 1 where it is over a bound."""
    if lacking := missing():
        sys.exit(lacking)
    prediction = traced(events)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "report.html"
        begin = time.perf_counter()
        write_page(prediction_report(prediction), path)
        written, megabytes = time.perf_counter() - begin, path.stat().st_size / 1e6
        with browser() as driver:
            opened = []
            for _ in range(3):
                driver.get("about:blank")
                begin = time.perf_counter()
                load(driver, path)
                opened.append(time.perf_counter() - begin)
    print(f"{len(prediction.trace.kind):,} events: {megabytes:.2f} MB, written in {written:.2f} s, drawn in {', '.join(f'{s:.2f}' for s in opened)} s")
    return int(megabytes > MEGABYTES or max(opened) > SECONDS)


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]) if len(sys.argv) > 1 else 60_000))
