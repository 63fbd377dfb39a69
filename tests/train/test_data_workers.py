"""Workers that read the data: the same weights with any number of them, and one line where they fail.

python -m pytest tests/train/test_data_workers.py [-m slow]
"""

import json
import os
import random
import signal
import subprocess
import sys
import time

import psutil
import pytest
import torch
from torch.utils.data import DataLoader

from memfit.errors import Exit, InputError
from memfit.job import Job
from memfit.plan import Plan, write_plan
from memfit.train.data.loader import BatchLoader
from memfit.train.data.reader import BatchReader
from memfit.train.data.stream import StreamSamples, checksum
from memfit.train.data.stream_file import read_stream_state, write_stream_state
from memfit.train.run_folder import RunFolder
from testing.kill_and_resume import ROOT, new_run, same_end, server
from testing.loaded_job import ShuffledStream, StatefulStream

JOBS = ROOT / "testing" / "loaded_job.py"
EACH = ["IndexedSamples", "Turns", "InPlaceTurns", "FileSamples", "Iterated", "StatefulSamples"]


def make_plan(folder, name, *, ranks=1, seconds=0.0):
    plan = Plan(
        job=f"{JOBS}:{name}", settings={"seconds": seconds}, device="cpu", budget_bytes=128 << 20, unit="samples",
        global_batch=16, micro_batch=4, micro_batches=[[4] * (4 // ranks)] * ranks, arithmetic="16 = 4 x 4",
        engine="single" if ranks == 1 else "ddp", precision="fp32", seed=0,
    )  # fmt: skip
    folder.mkdir(exist_ok=True)
    write_plan(plan, folder / "plan.toml")
    return folder / "plan.toml"


def log_of(run):
    return (run / "log.txt").read_text()


def run_command(plan, run, *options, **environment):
    """``memfit run`` to its end: (exit code, what it said)."""
    command = [sys.executable, "-m", "memfit", "run", str(plan), "--out", str(run), *options]
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **environment}
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False, cwd=ROOT, timeout=300)
    return done.returncode, done.stdout + done.stderr


def undisturbed_ends(tmp_path, server_process, name, counts):
    """Runs with these numbers of workers; all must end alike. Gives the first."""
    plan = make_plan(tmp_path, name)
    first = None
    for workers in counts:
        run = new_run(tmp_path / f"{name}-{workers}", plan)
        assert server_process.run(run, resume=False, more={"workers": workers})["code"] == 0, log_of(run)
        if first is None:
            first = run
        same_end(run, first)
    return first


@pytest.mark.parametrize("name", ["Turns", "StatefulSamples"])
def test_the_weights_are_the_same_with_any_number_of_workers(tmp_path, name):
    with server() as server_process:
        undisturbed_ends(tmp_path, server_process, name, (0, 3))


@pytest.mark.slow
@pytest.mark.parametrize("full", ["", "1"])
@pytest.mark.parametrize("name", EACH)
def test_they_are_the_same_with_kills_resumes_and_failures_of_memory(tmp_path, monkeypatch, name, full):
    """``full``: micro-batches of more than two samples do not fit."""
    monkeypatch.setenv("LOADED_FULL", full)
    with server() as server_process:
        undisturbed = undisturbed_ends(tmp_path, server_process, name, (0, 1, 4))
        if full:
            assert "out of memory in forward" in log_of(undisturbed)
        for workers in (0, 1, 4):
            run = new_run(tmp_path / f"{name}-killed-{workers}", tmp_path / "plan.toml")
            codes, resume = [], False
            for after in (0.5, 0.9, 1.2, None):
                more = {"workers": workers}
                codes.append(server_process.run(run, resume=resume, kill_after=after, more=more)["code"])
                resume = True
                if codes[-1] == 0:
                    break
            assert codes[-1] == 0, log_of(run)
            assert set(codes[:-1]) <= {-signal.SIGKILL}
            assert "Traceback" not in log_of(run)
            same_end(run, undisturbed)


@pytest.mark.slow
@pytest.mark.parametrize("full", ["", "1"])
@pytest.mark.parametrize("name", ["IndexedSamples", "StatefulSamples"])
def test_two_ranks_share_no_sample_and_end_alike_with_any_number_of_workers(tmp_path, name, full):
    plan = make_plan(tmp_path, name, ranks=2, seconds=0.005)
    runs = [tmp_path / f"run-{workers}" for workers in (0, 1, 4)]
    for workers, run in zip((0, 1, 4), runs, strict=True):
        code, words = run_command(plan, run, "--workers", str(workers), LOADED_FULL=full)
        assert code == 0, words
        same_end(run, runs[0])
    by_window = {}
    for line in (runs[0] / "samples.jsonl").read_text().splitlines():
        fields = json.loads(line)
        by_window.setdefault(fields["window"], []).extend(fields["ids"])
    assert len(by_window) == 12
    assert all(len(ids) == len(set(ids)) for ids in by_window.values())
    killed = tmp_path / "killed"
    command = [sys.executable, "-m", "memfit", "run", str(plan), "--out", str(killed), "--workers", "2"]
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "LOADED_FULL": full}
    process = subprocess.Popen([*command, "--save-every", "0"], env=env, stderr=subprocess.DEVNULL, cwd=ROOT)
    until = time.monotonic() + 60
    while time.monotonic() < until and not list((killed / "checkpoints").glob("0000000[4-9]")):
        time.sleep(0.02)
    mine = {child.pid for child in psutil.Process(process.pid).children(recursive=True)}
    process.kill()
    process.wait()
    assert not psutil.wait_procs([psutil.Process(pid) for pid in mine if psutil.pid_exists(pid)], timeout=10)[1]
    code, words = run_command(plan, killed, "--resume", "--workers", "3", LOADED_FULL=full)
    assert code == 0, words
    same_end(killed, runs[0])


FAULTS = {
    "raise": (Exit.BAD_INPUT, "loaded_job.py:", "ValueError: sample 20 is damaged; mend the job at that line"),
    "exit": (Exit.BAD_INPUT, "loaded_job.py:", "it called sys.exit(3), which ends the training before its last"),
    "lambda": (Exit.BAD_INPUT, "collate()", "its batch cannot leave a worker"),
    "os_exit": (Exit.STOPPED, "worker ", "ended by itself with exit code 3: code of the data set ends the process"),
    "kill": (Exit.STOPPED, "worker ", "was killed by signal 9 (SIGKILL): the system may have run out of memory"),
    "hang": (Exit.STOPPED, "the run has made no progress", "in fetch of window"),
    "memory": (Exit.STOPPED, "sample 20", "give it more --memory, or leave it out with --oversized skip"),
}


@pytest.mark.parametrize("kind", ["exit", pytest.param("os_exit", marks=pytest.mark.slow)])
def test_a_worker_that_fails_ends_the_run_in_one_line(tmp_path, kind):
    _fails(tmp_path, kind)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["raise", "lambda", "kill", "hang", "memory"])
def test_every_other_fault_of_a_worker_does_too(tmp_path, kind):
    _fails(tmp_path, kind)


def _fails(tmp_path, kind):
    """Sample 20 fails in a worker: windows before it are trained, the run is not done, and it goes on without it."""
    code, *words = FAULTS[kind]
    name = "Listed" if kind == "lambda" else "IndexedSamples"
    plan, run = make_plan(tmp_path, name), tmp_path / "run"
    patience = ["--patience", "5"] if kind == "hang" else []
    before = set(psutil.pids())
    ended, said = run_command(plan, run, "--workers", "2", *patience, LOADED_FAULT=f"{kind}:20")
    assert ended == code, said
    lines = said.strip().splitlines()
    last = lines[-2] if kind == "hang" else lines[-1]
    assert lines[-1].startswith("memfit: no report is written, since it runs the job's code too") is (kind == "hang")
    assert last.startswith("memfit: "), said
    assert all(part in last for part in words), last
    assert "Traceback" not in said
    assert "Done" not in said
    left = [pid for pid in set(psutil.pids()) - before if "loaded_job" in " ".join(_command_line(pid))]
    assert not left
    if kind == "hang":
        return
    ended, said = run_command(plan, run, "--workers", "2", "--resume")
    assert ended == 0, said
    same_end_as_undisturbed(tmp_path, plan, run)


def test_samples_that_a_library_cannot_give_are_said_in_one_line():
    """As of a DatasetDict, or a data frame: no line of the job is on the way."""
    reader = BatchReader(samples={"train": [1, 2]}, collate=list, seed=0)
    with pytest.raises(InputError, match=r"dataset\(\)\[0\]: KeyError: 0; write dataset\(self\) -> samples by index"):
        reader.read(0, (0,))


@pytest.mark.parametrize("samples", [[{"x": 1, "y": 2}, {"x": 1}], [{"x": torch.ones(2)}, {"x": 3}], [None, None]])
def test_samples_that_do_not_collate_are_said_in_one_line(samples):
    with pytest.raises(InputError, match=r"Job.collate\(\): .*; write collate\(self, samples\)"):
        BatchReader(samples=samples, collate=Job().collate, seed=0).read(0, (0, 1))


def same_end_as_undisturbed(tmp_path, plan, run):
    whole = tmp_path / "whole"
    code, said = run_command(plan, whole, "--workers", "0")
    assert code == 0, said
    same_end(run, whole)


def _command_line(pid):
    try:
        return psutil.Process(pid).cmdline()
    except psutil.Error:
        return []


def test_workers_end_in_silence_beside_loaders_of_the_job():
    """A DataLoader of the job sets a handler of SIGCHLD that raises wherever the main thread is."""
    theirs = iter(DataLoader(list(range(8)), num_workers=1))
    assert int(next(theirs)) == 0
    reader = BatchReader(samples=list(range(8)), collate=torch.tensor, seed=0)
    loader = BatchLoader(reader, 2, ahead=2, kept=2, slot_bytes=4096)
    loader.follow(0, 4, lambda window: [(window, window + 1)])
    assert [loader.read(window, (window, window + 1)).tolist() for window in range(4)] == [
        [0, 1],
        [1, 2],
        [2, 3],
        [3, 4],
    ]
    assert loader.read(1, (4, 5)).tolist() == [4, 5]
    loader.close()
    time.sleep(0.2)
    assert int(next(theirs)) == 1


def test_a_state_that_leaves_out_a_buffer_is_not_used():
    """The next sample tells: the stream is then read from its start, and gives what it would have given."""
    whole = stream_of(ShuffledStream)
    expected = [checksum(whole[position]) for position in range(96)]
    for position in (16, 48, 80):
        known = stream_of(ShuffledStream)
        assert checksum(known[position]) == expected[position]
        state = known.newest_state()
        assert state is not None
        assert state.position == position
        resumed = stream_of(ShuffledStream)
        resumed.load(state)
        assert [checksum(resumed[at]) for at in range(position, 96)] == expected[position:]


def test_a_state_that_is_whole_is_gone_on_from(tmp_path, monkeypatch):
    log = tmp_path / "read.txt"
    known = stream_of(StatefulStream)
    expected = [checksum(known[position]) for position in range(64)]
    monkeypatch.setenv("READ_LOG", str(log))
    resumed = stream_of(StatefulStream)
    known = stream_of(StatefulStream)
    assert checksum(known[48]) == expected[48]
    log.write_text("")
    resumed.load(known.newest_state())
    assert [checksum(resumed[position]) for position in range(48, 64)] == expected[48:]
    assert [int(line) for line in log.read_text().split()] == [position % 23 for position in range(48, 64)]


class OrderOfItsOwn:
    """Can only be iterated, and keeps no state; the order follows from ``seed``, or from nothing."""

    def __init__(self, seed):
        self.seed = seed

    def __iter__(self):
        chance = random.SystemRandom() if self.seed is None else random.Random(self.seed)
        yield from (torch.tensor(float(number)) for number in chance.sample(range(1000), 1000))


@pytest.mark.parametrize("seed", [None, 3])
def test_a_stream_without_a_state_whose_order_changes_is_said_where_it_is_gone_on_with(seed, tmp_path, capsys):
    folder = RunFolder(tmp_path)
    before = StreamSamples(OrderOfItsOwn(seed), seed=0, window=16, keep=32)
    expected = [float(before[position]) for position in range(64)]
    write_stream_state(folder, before.newest_state())
    state = read_stream_state(folder, 64)
    assert state is not None
    assert (state.position, state.state) == (48, None)
    resumed = StreamSamples(OrderOfItsOwn(seed), seed=0, window=16, keep=32)
    resumed.load(state)
    values = [float(resumed[position]) for position in range(48, 64)]
    said = capsys.readouterr().err
    assert ("its order changes when it begins anew, so samples may be left out or come twice" in said) == (seed is None)
    assert said.count("\n") == (seed is None)
    assert (values == expected[48:]) == (seed is not None)


def stream_of(kind):
    return StreamSamples(kind(0.0), seed=0, window=16, keep=32)


@pytest.mark.slow
def test_a_resumed_stream_goes_on_from_its_own_state(tmp_path, monkeypatch):
    """Windows 0 to 3 are samples 0 to 63 of epochs of 23: the resumed run does not read them again."""
    plan, log = make_plan(tmp_path, "StatefulSamples"), tmp_path / "read.txt"
    with server() as server_process:
        undisturbed = undisturbed_ends(tmp_path, server_process, "StatefulSamples", (0,))
    monkeypatch.setenv("READ_LOG", str(log))
    with server() as server_process:
        run = new_run(tmp_path / "run", plan)
        assert server_process.run(run, resume=False, windows=4, more={"workers": 1})["code"] == 0
        log.write_text("")
        assert server_process.run(run, resume=True, windows=6, more={"workers": 1})["code"] == 0, log_of(run)
        read = [int(line) for line in log.read_text().split()]
        first = read.index(48 % 23)  # what reading costs is measured on the first sample before
        assert first <= 2
        assert read[first:][:32] == [position % 23 for position in range(48, 80)]
        assert server_process.run(run, resume=True, more={"workers": 0})["code"] == 0, log_of(run)
        same_end(run, undisturbed)
