"""memfit run, in real processes: the folder, the metrics, the samples, resuming, and running out of memory."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from memfit.errors import InputError
from memfit.plan import read_plan, write_plan
from memfit.train.launch.process_guard import alone_in
from tests.train.job_text import linear

JOB = linear(512) + "\ntorch.ones(100 << 18)  # taken and given back before the memory is limited\n"


def memfit(*arguments, **options):
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, "-m", "memfit", *map(str, arguments)],
        capture_output=True,
        text=True,
        env=environment,
        **options,
    )


@pytest.fixture(scope="module")
def planned(tmp_path_factory) -> str:
    """The text of a plan for a job in the folder HERE."""
    folder = tmp_path_factory.mktemp("planned")
    (folder / "net.py").write_text(JOB)
    sizes = ("--global-batch", 16, "--micro-batch", 5, "--memory", "64MiB")
    made = memfit("plan", f"{folder}/net.py:Net", *sizes, "--out", folder / "plan.toml")
    assert made.returncode == 0, made.stderr
    return (folder / "plan.toml").read_text().replace(str(folder), "HERE")


@pytest.fixture
def plan(planned, tmp_path) -> Path:
    (tmp_path / "net.py").write_text(JOB)
    (tmp_path / "plan.toml").write_text(planned.replace("HERE", str(tmp_path)))
    return tmp_path / "plan.toml"


def lines(run: Path, name: str) -> list[dict]:
    return [json.loads(line) for line in (run / f"{name}.jsonl").read_text().splitlines()]


def test_a_run_writes_its_plan_metrics_samples_and_weights(plan, tmp_path):
    run = tmp_path / "run"
    done = memfit("run", plan, "--out", run, "--json")
    assert done.returncode == 0, done.stderr
    summary = json.loads(done.stdout)

    assert read_plan(run / "plan.toml") == read_plan(plan)
    assert read_plan(plan).micro_batches == [[5, 5, 5, 1]]
    metrics = lines(run, "metrics")
    assert [line["window"] for line in metrics] == list(range(6))
    assert summary["loss_last"] < summary["loss_first"]
    assert all(0 < line["measured_process_bytes"] < 20 * 2**20 for line in metrics)  # 100 MiB were there before
    assert summary["measured_process_bytes"] < summary["planned_process_bytes"] < 64 * 2**20
    epoch = [line["ids"] for line in lines(run, "samples")[:4]]
    assert [len(ids) for ids in epoch] == [16, 16, 16, 2]
    assert sorted(i for ids in epoch for i in ids) == list(range(50))
    assert metrics[3]["global_batch_done"] == 2
    assert set(load_file(run / "final" / "net.safetensors")) == {"0.weight", "0.bias", "3.weight", "3.bias"}
    assert "Done: 6 windows" in (run / "report.html").read_text()
    assert list((run / "tensorboard").glob("events.out.tfevents.*"))


@pytest.mark.slow
def test_a_stopped_run_goes_on_bit_for_bit(plan, tmp_path):
    undisturbed, parts = tmp_path / "whole", tmp_path / "parts"
    assert memfit("run", plan, "--out", undisturbed).returncode == 0
    assert memfit("run", plan, "--out", parts, "--windows", 2).returncode == 0
    assert memfit("run", plan, "--out", parts, "--windows", 6, "--resume").returncode == 0

    a, b = load_file(undisturbed / "final" / "net.safetensors"), load_file(parts / "final" / "net.safetensors")
    assert all(torch.equal(a[name], b[name]) for name in a)
    assert lines(undisturbed, "samples") == lines(parts, "samples")


def is_written(file):
    return file.exists() and file.stat().st_size > 0


@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.slow)])
def test_an_interrupted_run_finishes_its_window_and_exits_with_5(plan, tmp_path, number):
    """The signal comes to memfit run alone, which passes it on."""
    run = tmp_path / "run"
    arguments = [sys.executable, "-m", "memfit", "run", str(plan), "--out", str(run), "--windows", "100000"]
    with subprocess.Popen(arguments, stderr=subprocess.PIPE, text=True) as child:
        while not is_written(run / "metrics.jsonl") and child.poll() is None:
            time.sleep(0.1)
        child.send_signal(number)
        child.communicate(timeout=300)
    assert child.returncode == 5
    newest = max(int(item.name) for item in (run / "checkpoints").iterdir())
    assert newest == len(lines(run, "samples"))
    assert len(lines(run, "samples")) == len(lines(run, "metrics"))


def test_killing_memfit_run_alone_leaves_no_process_that_goes_on_training(plan, tmp_path):
    run = tmp_path / "run"
    arguments = [sys.executable, "-m", "memfit", "run", str(plan), "--out", str(run)]
    with subprocess.Popen([*arguments, "--windows", "100000", "--save-every", "0"], stderr=subprocess.PIPE) as parent:
        while not any((run / "checkpoints").glob("0*")) and parent.poll() is None:
            time.sleep(0.05)
        parent.kill()
    resumed = memfit("run", plan, "--out", run, "--resume", "--windows", "300")
    assert resumed.returncode == 0, resumed.stderr
    time.sleep(0.5)
    assert [line["window"] for line in lines(run, "samples")] == list(range(300))


def test_removing_the_folder_of_a_run_ends_it_with_one_line(plan, tmp_path):
    run = tmp_path / "run"
    arguments = [sys.executable, "-m", "memfit", "run", str(plan), "--out", str(run), "--windows", "1000000"]
    with subprocess.Popen([*arguments, "--save-every", "0"], stderr=subprocess.PIPE, text=True) as process:
        while not any((run / "checkpoints").glob("0*")) and process.poll() is None:
            time.sleep(0.05)
        run.rename(tmp_path / "elsewhere")
        try:
            _, said = process.communicate(timeout=60)
        finally:
            process.kill()
    assert process.returncode == 5
    said = [line for line in said.splitlines() if "not written" not in line]  # a checkpoint that was being written
    assert len(said) == 1
    assert f"the folder {run} was removed, moved or replaced while the run was writing to it" in said[0]
    assert not run.exists()


def test_a_folder_in_which_another_process_trains_is_refused(tmp_path):
    with (
        alone_in(tmp_path),
        pytest.raises(InputError, match="another process trains in it; wait until it ends"),
        alone_in(tmp_path, 0.2),
    ):
        pass
    with alone_in(tmp_path):
        pass


def test_a_run_over_its_budget_stops_with_one_line_and_exit_code_5(plan, tmp_path):
    from dataclasses import replace

    (tmp_path / "net.py").write_text(JOB.replace("512", "65536"))  # 4.5 MiB of parameters
    write_plan(replace(read_plan(plan), budget_bytes=1 << 20, phases={}), plan)
    stopped = memfit("run", plan, "--out", tmp_path / "run")
    assert stopped.returncode == 5
    assert "out of memory" in stopped.stderr
    assert "Traceback" not in stopped.stderr


def test_a_person_at_a_terminal_sees_it_go_on(plan, tmp_path):
    import pty

    terminal, other = pty.openpty()
    arguments = [sys.executable, "-m", "memfit", "run", str(plan), "--out", str(tmp_path / "run")]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TERM": "xterm", "COLUMNS": "80"}
    with subprocess.Popen(arguments, stdout=subprocess.DEVNULL, stderr=other, env=environment) as child:
        os.close(other)
        seen = b""
        while True:
            try:
                part = os.read(terminal, 1 << 16)
            except OSError:
                break
            if not part:
                break
            seen += part
    assert child.returncode == 0
    assert b"6/6" in seen
    assert re.search(rb"iB of 64(\.0)? MiB", seen), seen[-600:]
