"""Runs a script on the CPU under PyTorch's profiler, and writes the largest bytes of live tensors.

``python run_for_real.py OUT OPERATORS SCRIPT ARGS``: OPERATORS are the names, with commas, of the calls whose inner
blocks do not count. The garbage collector rests, as in a trace.
"""

import gc
import json
import os
import runpy
import sys
from pathlib import Path

import torch

from memfit.device.hardware.benchmarks import AllocatorEvents


def main() -> None:
    out, operators, script = Path(sys.argv[1]).absolute(), sys.argv[2].split(","), os.path.abspath(sys.argv[3])
    sys.argv = sys.argv[3:]
    sys.path[0] = os.path.dirname(script)
    torch.set_num_threads(1)
    torch.save = lambda *args, **kwargs: None
    gc.collect()
    gc.disable()
    with AllocatorEvents() as events, events.phase("whole"):
        runpy.run_path(script, run_name="__main__")
    peak = events.peaks(operators)["whole"]
    out.write_text(json.dumps([peak.without_scratch_bytes, peak.allocated_bytes]))


if __name__ == "__main__":
    main()
