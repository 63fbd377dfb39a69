"""Built-in jobs in tiny form on meshes: predicted, planned, run, killed, resumed, and verified against one device.

python -m pytest tests/train/test_built_in_mesh_runs.py -m slow
"""

import json
import os
import signal
import subprocess
import sys
import time

import pytest
import torch
from safetensors.torch import load_file

from memfit.mesh import MeshShape
from memfit.plan import read_plan
from tests.train.test_ranks import ROOT, lines, memfit

pytestmark = pytest.mark.slow
HYBRID, TENSOR, BOTH = MeshShape(dp_replicate=2, dp_shard=2), MeshShape(tp=2), MeshShape(dp_shard=2, tp=2)
NO_JUDGES = {"pixel_space_supervise": "false", "sync_weight": 0, "perceptual_weight": 0, "trepa_weight": 0}
JOBS = {
    "f5_tts/tiny": ({"dim": 64, "depth": 2, "longest": 48, "clips": 24}, 8 * 48, 48, "dit"),
    "gpt_sovits/s1": (
        {"dim": 64, "depth": 2, "clip_seconds": 1, "clips": 24, "dropout": 0, "precision": "fp32", "wrapper": "none"},
        8, 1, "gpt",
    ),
    "latentsync/tiny": (
        {"frames": 2, "clips": 24, "validate_every": 0, "validation_frames": 8, "inference_steps": 1, **NO_JUDGES},
        4, 2, "unet",
    ),
}  # fmt: skip
"""Settings, a window's batch and a micro-batch in the job's unit, and the net that is trained."""
CASES = [(job, mesh) for job in JOBS for mesh in (TENSOR, HYBRID)] + [("gpt_sovits/s1", BOTH)]
WINDOWS = 4


def settings(job):
    return [word for key, value in JOBS[job][0].items() for word in ("--set", f"{key}={value}")]


@pytest.mark.parametrize(("job", "mesh"), CASES, ids=str)
def test_a_run_that_is_killed_goes_on_bit_for_bit(job, mesh, tmp_path):
    _, batch, micro, net = JOBS[job]
    shape = ("--global-batch", batch, "--micro-batch", micro, "--mesh", mesh)
    file = tmp_path / "plan.toml"
    done = memfit("plan", job, *settings(job), *shape, "--memory", "2GiB", "--out", file)
    assert done.returncode == 0, done.stderr
    plan = read_plan(file)
    assert (plan.engine, plan.mesh, plan.ranks) == ("fsdp2", mesh.sizes(), mesh.world)

    whole, cut = tmp_path / "whole", tmp_path / "cut"
    done = memfit("run", file, "--out", whole, "--windows", WINDOWS)
    assert done.returncode == 0, done.stderr
    killed_after_a_window(file, cut)
    done = memfit("run", file, "--out", cut, "--windows", WINDOWS, "--resume")
    assert done.returncode == 0, done.stderr
    expected = load_file(whole / "final" / f"{net}.safetensors")
    learnt = load_file(cut / "final" / f"{net}.safetensors")
    assert [name for name, weight in expected.items() if not torch.equal(learnt[name], weight)] == []
    assert len(lines(cut, "metrics")) == WINDOWS


def killed_after_a_window(file, folder):
    """Starts the run, and kills its launcher when a window is done; the ranks end with it."""
    command = [sys.executable, "-m", "memfit", "run", str(file), "--out", str(folder), "--windows", str(WINDOWS)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True) as process:
        end = time.monotonic() + 200
        while process.poll() is None and time.monotonic() < end and not metrics_of(folder):
            time.sleep(0.05)
        process.send_signal(signal.SIGKILL)
    assert 0 < metrics_of(folder) < WINDOWS, "it was killed before the end"


def metrics_of(folder):
    file = folder / "metrics.jsonl"
    return file.read_text().count("\n") if file.exists() else 0


@pytest.mark.parametrize(("job", "mesh"), CASES, ids=str)
def test_it_is_predicted_and_verified_against_one_device(job, mesh):
    done = memfit(
        "predict", job, *settings(job), "--micro-batch", JOBS[job][2], "--mesh", mesh, "--device", "cpu", "--json"
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["mesh"] == mesh.sizes()
    shape = ("--global-batch", JOBS[job][1], "--micro-batch", JOBS[job][2])
    done = memfit("verify", job, *settings(job), *shape, "--mesh", mesh, "--windows", 2, "--json")
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)["worlds"][1]
    assert (answer["mesh"], answer["world"], answer["ok"]) == (str(mesh), mesh.world, True)
    assert 0 < answer["max_relative_difference"]["gradients"] <= answer["bound"]
    assert answer["of_bounds"]["parameters"] <= 1
