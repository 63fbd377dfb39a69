"""Data sets of webdataset, Hugging Face datasets and mosaicml-streaming: the same weights with any workers and ranks.

The libraries are not in the environment of the tests: each test skips where its library is not installed.

python -m pytest tests/train/test_stream_libraries.py [-m slow]
"""

import json
import os
import subprocess
import sys
import time

import pytest

from memfit.plan import Plan, write_plan
from testing.kill_and_resume import ROOT, same_end
from testing.streamed_job import write_samples

LIBRARIES = {
    "Datasets": "datasets", "DatasetsShuffled": "datasets", "WebDataset": "webdataset",
    "WebDatasetShuffled": "webdataset", "Mosaic": "streaming",
}  # fmt: skip
WINDOW = 12
PLACES = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
"""Where imports are looked for: libraries may lie in a folder of their own."""


def make_plan(folder, name, *, ranks):
    plan = Plan(
        job=f"{ROOT / 'testing' / 'streamed_job.py'}:{name}", settings={}, device="cpu", budget_bytes=1 << 30,
        unit="samples", global_batch=WINDOW, micro_batch=3, micro_batches=[[3] * (4 // ranks)] * ranks, arithmetic="",
        engine="single" if ranks == 1 else "ddp", precision="fp32", seed=0,
    )  # fmt: skip
    folder.mkdir(exist_ok=True)
    write_plan(plan, folder / "plan.toml")
    return folder / "plan.toml"


def run(plan, out, *options, windows=8, samples):
    command = [sys.executable, "-m", "memfit", "run", str(plan), "--out", str(out), "--windows", str(windows), *options]
    env = {**os.environ, "PYTHONPATH": PLACES, "OMP_NUM_THREADS": "1", "STREAM_FOLDER": str(samples)}
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False, cwd=ROOT, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    return done.stdout + done.stderr


def ids_of(out):
    return [json.loads(line) for line in (out / "samples.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("name", LIBRARIES)
def test_any_number_of_workers_and_a_resumed_run_give_the_same_weights(tmp_path, name):
    pytest.importorskip(LIBRARIES[name], reason=f"{LIBRARIES[name]} is not installed")
    samples = tmp_path / "samples"
    write_samples(LIBRARIES[name], samples)
    plan = make_plan(tmp_path, name, ranks=1)
    run(plan, tmp_path / "0", "--workers", "0", samples=samples)
    for workers in ("1", "4"):
        run(plan, tmp_path / workers, "--workers", workers, samples=samples)
        same_end(tmp_path / workers, tmp_path / "0")
    run(plan, tmp_path / "resumed", "--workers", "1", windows=5, samples=samples)
    run(plan, tmp_path / "resumed", "--workers", "0", "--resume", samples=samples)
    same_end(tmp_path / "resumed", tmp_path / "0")


@pytest.mark.slow
@pytest.mark.parametrize("name", LIBRARIES)
def test_two_ranks_share_no_sample_and_go_on_after_a_kill(tmp_path, name):
    pytest.importorskip(LIBRARIES[name], reason=f"{LIBRARIES[name]} is not installed")
    samples = tmp_path / "samples"
    write_samples(LIBRARIES[name], samples)
    plan = make_plan(tmp_path, name, ranks=2)
    run(plan, tmp_path / "whole", "--workers", "1", samples=samples)
    by_window = {}
    for line in ids_of(tmp_path / "whole"):
        by_window.setdefault(line["window"], []).extend(line["ids"])
    assert all(len(ids) == len(set(ids)) <= WINDOW for ids in by_window.values())
    assert len(by_window[0]) == WINDOW
    killed = tmp_path / "killed"
    command = [sys.executable, "-m", "memfit", "run", str(plan), "--out", str(killed), "--workers", "1"]
    env = {**os.environ, "PYTHONPATH": PLACES, "OMP_NUM_THREADS": "1", "STREAM_FOLDER": str(samples)}
    options = ["--windows", "8", "--save-every", "0"]
    process = subprocess.Popen([*command, *options], env=env, stderr=subprocess.DEVNULL, cwd=ROOT)
    until = time.monotonic() + 120
    while time.monotonic() < until and not list((killed / "checkpoints").glob("0000000[3-9]")):
        time.sleep(0.02)
    process.kill()
    process.wait()
    run(plan, killed, "--resume", "--workers", "0", samples=samples)
    same_end(killed, tmp_path / "whole")
