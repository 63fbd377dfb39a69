"""memfit validate: a checkpoint's own nets, within a budget, and the same values each time.

python -m pytest tests/train/test_validation_worker.py
"""

import json
import os
import pickle
import shutil
import subprocess
import sys
import time
from dataclasses import replace

import pytest
import torch
from click.testing import CliRunner

from memfit.apply.train_state import build
from memfit.device.hardware.catalogue import with_memory
from memfit.device.hardware.local_devices import local_cpu
from memfit.geometry import shape_of
from memfit.loading import load_job
from memfit.planner.request import PlanRequest
from memfit.planner.search.search import find_plan
from memfit.trace.step_phases import fetch_synthetic, validate_once
from memfit.train.checkpoint.checkpoints import Checkpoints, read_checkpoint
from memfit.train.checkpoint.saver import Saver
from memfit.train.launch.validation_worker import main
from memfit.train.loop.phases import VALIDATION
from memfit.train.loop.rng import seed_stream
from tests.cli.asking import ROOT, is_one_line, really

JOB = "testing/nets.py:Convolution"


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """(a run's folder with checkpoints of windows 1 and 2, the nets of window 2)."""
    run = tmp_path_factory.mktemp("runs")
    job = load_job(JOB)
    plan = find_plan(
        job, PlanRequest(name=JOB, global_batch=6, device=with_memory(local_cpu(), 256 << 20), micro_batch=4)
    ).plan
    saver = Saver(checkpoints=Checkpoints(run / "checkpoints"), plan=plan)
    for number in (1, 2):
        torch.manual_seed(number)
        train_state = build(job, "cpu")
        saver.save(train_state, number)
    return run, train_state


def expected(train_state):
    seed_stream(0, 0, 0, VALIDATION)
    shape = shape_of(train_state.job, 4)
    return validate_once(
        train_state,
        lambda: fetch_synthetic(train_state.job, shape, train_state.device, validation=True),
        lambda part: None,
    )


def test_the_newest_checkpoint_of_a_run_gives_its_own_nets_values(saved):
    run, train_state = saved
    code, out, err = really("validate", str(run), "--json")
    assert code == 0, err
    answer = json.loads(out)
    assert answer["checkpoint"] == str(run / "checkpoints" / "00000002")
    assert (answer["window"], answer["items"]) == (2, 4)
    assert answer["values"] == {"loss": float(expected(train_state)["loss"])}
    assert 0 < answer["measured_process_bytes"] < answer["budget_bytes"]


def test_a_torn_one_is_passed_over_and_a_small_budget_ends_with_3(saved, tmp_path):
    run = shutil.copytree(saved[0], tmp_path / "run")
    os.truncate(run / "checkpoints" / "00000002" / "state.safetensors", 1000)
    code, out, err = really("validate", str(run), "--memory", "256KiB")
    assert (code, out) == (3, ""), err
    assert "00000002: it is torn or no checkpoint: state.safetensors has 1000 bytes" in err
    assert "out of memory" in err
    assert "the budget is 256 KiB" in err
    assert "Traceback" not in err
    is_one_line(
        really("validate", str(run / "checkpoints" / "00000002")),
        "00000002: it is torn or no checkpoint",
        "take another",
    )


def wrong(target, tmp_path, capfd):
    capfd.readouterr()
    return main([str(target), str(tmp_path / "found.json"), "0"]), *capfd.readouterr()


def test_what_cannot_be_validated_is_one_line(saved, tmp_path, capfd):
    class Code:
        def __reduce__(self):
            return (os.mkdir, (str(tmp_path / "ran"),))

    (tmp_path / "weights.pt").write_bytes(pickle.dumps(Code()))
    is_one_line(wrong(tmp_path / "none", tmp_path, capfd), "no such folder", "memfit run --out")
    is_one_line(wrong(tmp_path, tmp_path, capfd), "there is no checkpoint in it")
    is_one_line(wrong(tmp_path / "weights.pt", tmp_path, capfd), "weights.pt: it is foreign, a pickle")
    assert not (tmp_path / "ran").exists()

    job = load_job("testing/nets.py:Gan")
    plan = find_plan(
        job,
        PlanRequest(
            name="testing/nets.py:Gan", global_batch=4, device=with_memory(local_cpu(), 256 << 20), micro_batch=4
        ),
    ).plan
    Saver(checkpoints=Checkpoints(tmp_path / "checkpoints"), plan=plan).save(build(job, "cpu"), 1)
    is_one_line(wrong(tmp_path, tmp_path, capfd), "Gan: it has no validation", "write validate(self, nets, batch)")


def test_the_process_ends_with_a_verb_that_is_killed_while_it_imports_its_libraries(saved):
    """torch takes seconds to import: a process whose parent is gone must not begin with it."""
    run, _ = saved
    seen = "import sys, runpy; sys.argv = ['', *sys.argv[1:]]; runpy.run_module(sys.argv.pop(1), run_name='__main__')"
    watch = f"import atexit, sys; atexit.register(lambda: print('torch' in sys.modules)); {seen}"
    entry = "memfit.train.launch.validation_entry"
    command = [sys.executable, "-c", watch, entry, str(run), str(run / "values.json"), "0"]
    environment = {**os.environ, "MEMFIT_PARENT": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=ROOT, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (5, "False\n", "")


def test_validate_starts_the_entry_that_ends_with_it(saved, monkeypatch):
    from memfit.cli import validate
    from memfit.train.launch import supervisor

    commands = []
    monkeypatch.setattr(supervisor, "run_child", lambda command, environment: commands.append(command) or 2)
    CliRunner().invoke(validate.command, [str(saved[0])])
    assert commands[0][2] == "memfit.train.launch.validation_entry"


def test_a_validation_does_not_wait_for_threads_of_the_job(saved, tmp_path):
    run, _ = saved
    (tmp_path / "held.py").write_text(
        "import threading, time\nfrom testing.nets import Convolution\n\n\nclass Held(Convolution):\n"
        "    def validation_batch(self, shape):\n"
        "        if 'reader' not in {thread.name for thread in threading.enumerate()}:\n"
        "            threading.Thread(target=time.sleep, args=(60,), name='reader').start()\n"
        "        return super().validation_batch(shape)\n"
    )
    copy = shutil.copytree(run, tmp_path / "run")
    shutil.rmtree(copy / "checkpoints")
    plan = replace(read_checkpoint(run / "checkpoints" / "00000002").plan, job=f"{tmp_path}/held.py:Held")
    train_state = build(load_job(plan.job), "cpu")
    Saver(checkpoints=Checkpoints(copy / "checkpoints"), plan=plan).save(train_state, 2)
    begin = time.monotonic()
    code, out, err = really("validate", str(copy), "--json")
    assert code == 0, err
    assert json.loads(out)["window"] == 2
    assert "memfit: the validation is done, and the job's threads (reader) have not ended 5 s later" in err
    assert time.monotonic() - begin < 50


@pytest.mark.parametrize("name", ["a" * 5000, "loop"])
def test_a_path_that_the_system_refuses_is_one_line(saved, tmp_path, name, capsys):
    run, _ = saved
    (tmp_path / "loop").symlink_to("loop")
    assert main([str(tmp_path / name / "run"), str(run / "values.json"), "0"]) == 2
    assert "write" in capsys.readouterr().err


def test_a_file_or_folder_within_a_run_gives_the_folder_to_write(saved, capsys):
    run, _ = saved
    number = run / "checkpoints" / "00000002"
    for path, write in (
        (number / "state.safetensors", f"write {number}"),
        (number / "plan.toml", f"write {number}"),
        (run / "checkpoints", f"write {run}, or one of its numbers"),
    ):
        assert main([str(path), str(run / "values.json"), "0"]) == 2
        assert write in capsys.readouterr().err
