"""Runs on several machines: here two addresses of loopback stand for two machines that share a folder.

python -m pytest tests/train/test_nodes.py -m "slow or not slow"
"""

import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file
from torch.distributed.elastic.rendezvous import RendezvousConnectionError, RendezvousTimeoutError

from memfit.cli import main
from memfit.engine import node_rendezvous
from memfit.engine.nodes import Nodes
from memfit.errors import InputError
from memfit.plan import read_plan, write_plan
from memfit.train.launch import node_launch
from memfit.train.launch.node_launch import meet, shared_outcome
from memfit.train.launch.outcome import Outcome, read_outcome, write_outcome
from memfit.verify.verify_plan import on_ranks
from testing.ports import free_port
from tests.train.test_ranks import lines, memfit, plan

ROOT = Path(__file__).parents[2]
HOST = "127.0.0.2"
WINDOWS = 60


@pytest.fixture(name="nodes")
def _nodes():
    first = Nodes(count=2, rank=0, host=HOST, port=free_port(HOST))
    return first, replace(first, rank=1)


@pytest.fixture(name="two", scope="module")
def _two(tmp_path_factory):
    """A plan for two devices, and the weights of its run on one machine."""
    folder = tmp_path_factory.mktemp("two")
    read = on_ranks(read_plan(plan(folder, name="Still")), "ddp", 2)
    write_plan(read, folder / "two.toml")
    done = memfit("run", folder / "two.toml", "--out", folder / "run", "--windows", WINDOWS)
    assert done.returncode == 0, done.stderr
    return folder / "two.toml", load_file(folder / "run" / "final" / "net.safetensors")


def start(file: Path, out: Path, node: Nodes, *options: str) -> subprocess.Popen:
    own = ("--nnodes", node.count, "--node-rank", node.rank, "--rdzv-endpoint", f"{node.host}:{node.port}")
    words = ("run", file, "--out", out, "--windows", WINDOWS, "--save-every", 0, *own, *options)
    return subprocess.Popen(
        [sys.executable, "-m", "memfit", *map(str, words)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        start_new_session=True,
    )


def trained(out: Path) -> int:
    return len(lines(out, "metrics")) if (out / "metrics.jsonl").exists() else 0


def wait_for(out: Path, windows: int, *processes: subprocess.Popen) -> None:
    until = time.monotonic() + 240
    while trained(out) < windows:
        assert time.monotonic() < until
        assert all(process.poll() is None for process in processes), [process.communicate() for process in processes]
        time.sleep(0.02)


def started_without_its_second(file: Path, out: Path, nodes: tuple[Nodes, Nodes]) -> subprocess.Popen:
    """The first of two nodes that have trained 5 windows, once the second is killed with all of its processes."""
    first, second = (start(file, out, node) for node in nodes)
    wait_for(out, 5, first, second)
    os.killpg(second.pid, signal.SIGKILL)
    second.communicate()
    return first


def test_nodes_meet_in_the_same_round_and_one_that_comes_back_joins_the_next(nodes, tmp_path):
    with meet(nodes[0], tmp_path) as first, meet(nodes[1], tmp_path) as second:
        assert not second.has_begun
        numbers = []
        caller = threading.Thread(target=lambda: numbers.append(first.next_round()))
        caller.start()
        assert second.next_round() == 1
        caller.join()
        with meet(nodes[1], tmp_path) as again:
            assert again.has_begun
            caller = threading.Thread(target=lambda: numbers.append(again.next_round()))
            caller.start()
            time.sleep(0.5)
            assert numbers == [1], "a round that its former self has joined is over"
            assert first.next_round() == 2
            caller.join()
        assert numbers == [1, 2]
    assert not list(tmp_path.iterdir())


def test_a_node_that_does_not_come_is_named(nodes, tmp_path, monkeypatch):
    monkeypatch.setattr(node_rendezvous, "NODE_SECONDS", 0.5)
    with meet(nodes[0], tmp_path) as first, pytest.raises(RendezvousTimeoutError, match=r"node 1 was not there"):
        first.next_round()


def test_a_first_node_that_goes_away_is_named(nodes, tmp_path):
    with meet(nodes[0], tmp_path) as first, meet(nodes[1], tmp_path) as second:
        first.store = None
        node_rendezvous._meetings.clear()
        del first
        with pytest.raises(RendezvousConnectionError, match=r"node 0 at 127\.0\.0\.2:\d+ is gone"):
            second.next_round()


@pytest.mark.parametrize("first_to_end", [0, 1])
def test_nodes_without_a_shared_folder_tell_each_other_how_the_launch_ended(nodes, tmp_path, monkeypatch, first_to_end):
    monkeypatch.setattr(node_launch, "_VISIBLE_SECONDS", 0.3)
    folders = [tmp_path / "first", tmp_path / "second"]
    folders[0].mkdir()
    with meet(nodes[0], folders[0]) as first, meet(nodes[1], folders[1]) as second:
        assert (first.is_separate, second.is_separate) == (False, True)
        with shared_outcome(first, folders[0]), shared_outcome(second, folders[1]):
            monkeypatch.setenv("TORCHELASTIC_RUN_ID", first.run_id)
            write_outcome(folders[first_to_end], Outcome(code=5))
            write_outcome(folders[first_to_end], Outcome(code=2))
            until = time.monotonic() + 20
            while read_outcome(folders[1 - first_to_end]) is None and time.monotonic() < until:
                time.sleep(0.05)
        assert [read_outcome(folder).code for folder in folders] == [5, 5]
    assert (folders[1] / ".separate").exists()
    assert (folders[1] / ".memfit-run").exists()


def test_a_folder_that_is_no_runs_is_not_taken_for_a_nodes_own(nodes, tmp_path, monkeypatch):
    monkeypatch.setattr(node_launch, "_VISIBLE_SECONDS", 0.3)
    (tmp_path / "first").mkdir()
    (tmp_path / "second").mkdir()
    (tmp_path / "second" / "thesis.txt").write_text("mine")
    with (
        meet(nodes[0], tmp_path / "first"),
        pytest.raises(InputError, match="no run has written into it"),
        meet(nodes[1], tmp_path / "second"),
    ):
        pass


def test_a_port_that_is_taken_is_refused(nodes, tmp_path):
    with (
        meet(nodes[0], tmp_path),
        pytest.raises(InputError, match="node 0 cannot listen there: Address already in use"),
        meet(nodes[0], tmp_path),
    ):
        pass


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--nnodes", "2"], "the machines have no place to meet; write --rdzv-endpoint"),
        (["--nnodes", "2", "--rdzv-endpoint", "host"], "not an address and a port"),
        (["--nnodes", "2", "--node-rank", "2", "--rdzv-endpoint", "h:1"], "2 machines are 0 to 1; write 1 or less"),
        (["--nnodes", "3", "--rdzv-endpoint", "h:1"], "the plan's 2 devices are not a multiple of it"),
        (["--node-rank", "1"], "the run has one machine; write --nnodes"),
    ],
)
def test_machines_that_cannot_be_are_refused_in_one_line(options, words, tmp_path, capsys):
    write_plan(on_ranks(read_plan(plan(tmp_path, name="Still")), "ddp", 2), tmp_path / "two.toml")
    with pytest.raises(SystemExit) as ended:
        main(["run", str(tmp_path / "two.toml"), "--out", str(tmp_path / "run"), *options])
    assert ended.value.code == 2
    said = capsys.readouterr().err
    assert words in said
    assert said.count("\n") == 1
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_two_nodes_train_what_one_machine_trains(nodes, two, tmp_path):
    file, weights = two
    processes = [start(file, tmp_path / "run", node) for node in nodes]
    for process in processes:
        said = process.communicate(timeout=300)
        assert process.returncode == 0, said
    for name, weight in load_file(tmp_path / "run" / "final" / "net.safetensors").items():
        assert torch.equal(weight, weights[name])
    assert not [path.name for path in (tmp_path / "run").iterdir() if path.name.startswith((".nodes", ".ended"))]


@pytest.mark.slow
def test_a_node_that_is_lost_and_comes_back_goes_on(nodes, two, tmp_path):
    file, weights = two
    run = tmp_path / "run"
    first = started_without_its_second(file, run, nodes)
    before = trained(run)
    again = start(file, run, nodes[1])
    for process in (first, again):
        said = process.communicate(timeout=300)
        assert process.returncode == 0, said
    assert before < WINDOWS
    for name, weight in load_file(run / "final" / "net.safetensors").items():
        assert torch.equal(weight, weights[name])


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["ddp", "fsdp2"])
def test_nodes_without_a_shared_folder_train_the_same_and_an_empty_node_replaces_a_lost_one(nodes, tmp_path, engine):
    """The second node is killed, and its disk is lost: what it starts with comes from the first one."""
    read = on_ranks(read_plan(plan(tmp_path, name="Still")), engine, 2)
    write_plan(read, tmp_path / "two.toml")
    whole = memfit("run", tmp_path / "two.toml", "--out", tmp_path / "whole", "--windows", WINDOWS)
    assert whole.returncode == 0, whole.stderr
    folders = [tmp_path / "first", tmp_path / "second"]
    first, second = (start(tmp_path / "two.toml", *place) for place in zip(folders, nodes, strict=True))
    wait_for(folders[0], 5, first, second)
    os.killpg(second.pid, signal.SIGKILL)
    second.communicate()
    before = trained(folders[0])
    shutil.rmtree(folders[1])
    again = start(tmp_path / "two.toml", folders[1], nodes[1])
    for process in (first, again):
        said = process.communicate(timeout=400)
        assert process.returncode == 0, said
        assert "Traceback" not in said[1]
    assert 0 < before < WINDOWS
    weights = load_file(tmp_path / "whole" / "final" / "net.safetensors")
    for name, weight in load_file(folders[0] / "final" / "net.safetensors").items():
        assert torch.equal(weight, weights[name])
    numbers = [int(entry.name) for entry in (folders[1] / "checkpoints").iterdir()]
    assert numbers
    assert max(numbers) < WINDOWS, "it was given the checkpoint with which it started, and writes none itself"
    assert not (folders[1] / "final").exists()
    assert not [path for folder in folders for path in folder.glob(".ended*")]


@pytest.mark.slow
def test_what_a_lost_node_leaves_goes_on_with_another_world_size(nodes, two, tmp_path):
    file, weights = two
    run = tmp_path / "run"
    first = started_without_its_second(file, run, nodes)
    time.sleep(1)
    first.send_signal(signal.SIGTERM)
    said = first.communicate(timeout=60)
    assert first.returncode == 5, said
    assert "--resume" in said[1]
    write_plan(on_ranks(read_plan(file), "single", 1), tmp_path / "one.toml")
    ended = memfit("run", tmp_path / "one.toml", "--out", run, "--windows", WINDOWS, "--resume")
    assert ended.returncode == 0, ended.stderr
    for name, weight in load_file(run / "final" / "net.safetensors").items():
        torch.testing.assert_close(weight, weights[name], rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_a_signal_to_another_node_stops_the_run(nodes, two, tmp_path):
    run = tmp_path / "run"
    first, second = (start(two[0], run, node) for node in nodes)
    wait_for(run, 3, first, second)
    second.send_signal(signal.SIGTERM)
    for process in (first, second):
        said = process.communicate(timeout=60)
        assert process.returncode == 5, said
        assert "Traceback" not in said[1]


SRUN = """#!/bin/sh
export SLURM_NNODES=2
SLURM_NODEID=1 "$@" &
SLURM_NODEID=0 "$@" || exit $?
wait $!
"""


@pytest.mark.slow
@pytest.mark.parametrize("to", ["slurm", "skypilot"])
def test_an_exported_script_starts_both_machines_with_stand_ins_for_the_scheduler(to, two, tmp_path):
    exported = memfit("export", two[0], "--to", to, "--nnodes", 2, "--out", tmp_path / "script")
    assert exported.returncode == 0, exported.stderr
    text = (tmp_path / "script").read_text()
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "SLURM_JOB_ID": str(os.getpid())}
    tools = {
        "srun": SRUN,
        "scontrol": f"#!/bin/sh\necho {HOST}\n",
        "memfit": f'#!/bin/sh\nexec {sys.executable} -m memfit "$@"',
    }
    for name, script in tools.items():
        (tmp_path / name).write_text(script)
        (tmp_path / name).chmod(0o755)
    environment["PATH"] = f"{tmp_path}:{environment['PATH']}"
    commands = [text]
    if to == "skypilot":
        task = yaml.safe_load(text)
        assert task["num_nodes"] == 2
        ips = f"export SKYPILOT_NUM_NODES=2 SKYPILOT_NODE_IPS='{HOST}\n127.0.0.3' SKYPILOT_NODE_RANK="
        port = free_port(HOST)
        commands = [f"{ips}{rank}; {task['run'].replace('29400', str(port))}" for rank in (0, 1)]
    started = [subprocess.Popen(["sh", "-c", command], cwd=tmp_path, env=environment) for command in commands]
    assert [process.wait(timeout=300) for process in started] == [0] * len(started)
    (weights,) = tmp_path.glob("**/final/net.safetensors")
    assert load_file(weights).keys() == two[1].keys()


@pytest.mark.slow
def test_node_0_says_that_it_waits_and_ends_on_a_signal(two, nodes, tmp_path):
    """Signals are blocked while torchrun starts ranks: node 0 alone waited 900 s, whatever it was sent."""
    alone = start(two[0], tmp_path / "run", nodes[0])
    said = next(line for line in alone.stderr if line.startswith("memfit: "))
    begin = time.monotonic()
    alone.terminate()
    rest = alone.communicate(timeout=60)[1]
    assert said.startswith("memfit: waiting ")
    assert time.monotonic() - begin < 10
    assert alone.returncode == 5, rest
    assert "Traceback" not in rest
