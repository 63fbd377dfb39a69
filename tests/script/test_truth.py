"""The same script traced on the virtual CPU and really run on the CPU under the profiler, phase by phase."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from memfit.script.command import parse_command
from memfit.script.launch import trace_script
from memfit.script.outcome import TraceRequest
from memfit.trace.self_test import live_peaks
from testing.truth import operator_names

HERE = Path(__file__).parent
BOUND = 100e-6

SCRIPTS = [
    "plain_loop.py", "two_optimizers.py", "retained_logits.py", "reentrant_checkpoint.py reentrant",
    "reentrant_checkpoint.py no", "step_in_backward.py", "shared_sampling.py", "varying_shapes.py",
    "conv_batch_norm.py", "feature_matching.py", "lip_sync.py", "encoder_evaluation.py", "func_transforms.py",
    "shuffled_lengths.py", "tiled_head.py", "tensor_subclass.py", "masked_writes.py", "selective_scan.py",
    "hand_written_updates.py", "averaged_weights.py", "hugging_face_trainer.py cpu",
    "sparse_gradients.py bag", "sparse_gradients.py adagrad",
    "sparse_gradients.py sgd", "sparse_gradients.py adam", "experts.py nonzero", "experts.py index",
    "experts.py masked_select", "experts.py any", "experts.py one_hot", "experts.py scatter", "experts.py checkpoint",
    "experts.py bincount", "experts.py sum", "experts.py scattered",
    "products_in_place.py", "net_snapshots.py", "saved_nets.py", "spectral_lbfgs.py",
]  # fmt: skip
WITHIN_SPARSE = {"add", "add_", "addmm", "clone", "index", "mm", "mul", "transpose"}
"""Operators within which the profiler shows what sparse tensors allocate, and a trace on their own."""


@pytest.mark.slow
@pytest.mark.parametrize("script", SCRIPTS)
def test_the_trace_of_a_script_has_the_bytes_of_its_real_run(script: str, tmp_path: Path, monkeypatch) -> None:
    words = script.split()
    path, arguments = str(HERE / "samples" / words[0]), words[1:]
    monkeypatch.chdir(tmp_path)
    command = parse_command(["python", path, *arguments])
    outcome = trace_script(TraceRequest(command=command, device="cpu", memory_bytes=8 << 30, batches=1000))
    assert outcome.error is None, outcome.error.text
    assert outcome.bare is not None
    traced = live_peaks(outcome.bare)
    names = operator_names(outcome.bare)
    if words[0] == "sparse_gradients.py":
        names -= {f"aten::{name}" for name in WITHIN_SPARSE}
    operators = ",".join(sorted(names))
    subprocess.run(
        [sys.executable, str(HERE / "run_for_real.py"), "real.json", operators, path, *arguments],
        check=True, env={**os.environ, "PYTHONPATH": str(HERE.parents[1]), "OMP_NUM_THREADS": "1"},
        capture_output=True,
    )  # fmt: skip
    really = json.loads(Path("real.json").read_text())
    if "validate" not in traced and "validate" in really:  # a forward without gradients in each window is training
        really["train"] = max(really["train"], really.pop("validate"))
    if "setup" not in traced:  # without an optimizer of torch, all is training
        really["train"] = max(really["train"], really.pop("setup"))
    assert traced == pytest.approx(really, rel=BOUND)
