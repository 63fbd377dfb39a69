"""python -m bench.report [EVENTS]: size of the report of a long step, and the time until Chromium has drawn it.

The trace is that of a DiT with as many blocks as give it EVENTS events (60,000). Bounds of the project: under 8 MB,
drawn in under 3 s.
"""

from __future__ import annotations

import math
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from memfit.device.hardware.catalogue import find_device
from memfit.geometry import shape_of
from memfit.loading import load_job
from memfit.planner.predict import Prediction, predict
from memfit.show.page import write_page
from memfit.show.report import prediction_report
from testing.browser import browser, load, missing

MEGABYTES, SECONDS = 8.0, 3.0


def traced(events: int) -> Prediction:
    """A prediction whose trace has at least so many events: the job gets as many blocks as that takes."""
    spec = f"{Path(__file__).parents[1]}/testing/nets.py:Transformer"
    count = [len(_predicted(spec, depth).trace.kind) for depth in (2, 4)]
    each = (count[1] - count[0]) / 2
    return _predicted(spec, 2 + max(math.ceil((events - count[0]) / each), 0))


def _predicted(spec: str, depth: int) -> Prediction:
    job = load_job(spec, {"depth": str(depth)})
    return predict(job, spec, shape_of(job, 640), find_device("rtx4090"), micro_batches=2)


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
    times = ", ".join(f"{seconds:.2f}" for seconds in opened)
    events = f"{len(prediction.trace.kind):,} events"
    print(f"{events}: {megabytes:.2f} MB, written in {written:.2f} s, drawn in {times} s")
    return int(megabytes > MEGABYTES or max(opened) > SECONDS)


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]) if len(sys.argv) > 1 else 60_000))
