"""memfit run over real ranks: torchrun, a rank that is killed, ranks that disagree.

python -m pytest tests/train/test_ranks.py
"""

import json
import os
import re
import subprocess
import sys
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch
from safetensors.torch import load_file

from memfit.batch.windows import Windows
from memfit.plan import read_plan
from tests.train.job_text import linear

ROOT = Path(__file__).parents[2]
JOB = (
    "import ctypes\nimport os\nimport signal\n"
    + linear(64, "Linear")
    + """
class Net(Linear):
    killed: str = ""

    def loss(self, nets, batch):
        loss = super().loss(nets, batch)
        if self.killed and os.environ.get("RANK") == "1":
            self.calls = getattr(self, "calls", 0) + 1
            if self.calls == 8 and not os.path.exists(self.killed):
                open(self.killed, "w").close()
                os.kill(os.getpid(), signal.SIGKILL)
        return loss

class Torn(Net):
    def dataset(self):
        rank = int(os.environ.get("RANK", "0"))
        return super().dataset()[: 50 - 10 * rank]

class Crashes(Linear):
    mark: str = ""

    def loss(self, nets, batch):
        self.calls = getattr(self, "calls", 0) + 1
        if os.environ.get("RANK") == "1" and self.calls == 4 and os.path.exists(self.mark):
            ctypes.string_at(0)
        return super().loss(nets, batch)

class Still(Net):
    def nets(self):
        return {"net": nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 1))}

class Hangs(Net):
    def loss(self, nets, batch):
        self.calls = getattr(self, "calls", 0) + 1
        if os.environ.get("RANK") == "1" and self.calls == 8:
            import time
            time.sleep(3600)
        return super().loss(nets, batch)

class Uneven(Net):
    # Rank 1 alone changes a weight in its forward, and has no memory for its first validations.
    validate_every = 2
    real_validation_batch = True

    def nets(self):
        return {**super().nets(), "slow": nn.Linear(16, 1).requires_grad_(False)}

    def loss(self, nets, batch):
        if os.environ.get("RANK") == "1":
            with torch.no_grad():
                nets["slow"].bias += 1
        return super().loss(nets, batch)

    def validate(self, nets, batch):
        self.tried = getattr(self, "tried", 0) + 1
        if os.environ.get("RANK") == "1" and self.tried < 3:
            raise MemoryError("planted")
        return {"error": float(nets["net"](batch[0]).square().mean()), "items": len(batch[0])}
"""
)


def memfit(*arguments, launcher=()):
    return subprocess.run(
        [sys.executable, *launcher, "-m", "memfit", *map(str, arguments)],
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "MEMFIT_COLLECTIVE_SECONDS": "30"},
        timeout=300,
    )


def plan(folder: Path, *settings: str, name: str = "Net") -> Path:
    (folder / "net.py").write_text(JOB)
    path = folder / f"{name}{len(settings)}.toml"
    path.write_text(planned(name, settings).replace("HERE", str(folder)))
    return path


@cache
def planned(name: str, settings: tuple[str, ...]) -> str:
    """The text of a plan for a job in the folder HERE, made once."""
    with TemporaryDirectory() as folder:
        Path(folder, "net.py").write_text(JOB)
        made = memfit(
            "plan", f"{folder}/net.py:{name}", "--global-batch", 16, "--micro-batch", 5, "--devices", 2,
            "--memory", "64MiB", "--out", f"{folder}/plan.toml", *settings,
        )  # fmt: skip
        assert made.returncode == 0, made.stderr
        return Path(folder, "plan.toml").read_text().replace(folder, "HERE")


def lines(run: Path, name: str) -> list[dict]:
    return [json.loads(line) for line in (run / f"{name}.jsonl").read_text().splitlines()]


@pytest.mark.slow
def test_a_rank_that_crashes_in_native_code_at_each_start_is_named_with_the_line_that_called_it(tmp_path):
    mark, run = tmp_path / "mark", tmp_path / "run"
    mark.touch()
    file = plan(tmp_path, "--set", f"mark={mark}", name="Crashes")
    ended = memfit("run", file, "--out", run)
    assert ended.returncode == 5, ended.stderr
    crashed = (
        r"signal 11, a crash in native code that \S*net\.py:\d+ in loss\(\) called \(stacks: \S+crash-1\.\S+\) too"
    )
    assert re.search(crashed, ended.stderr), ended.stderr
    starts = ["crash-1.start-1.txt", "crash-1.start-2.txt", "crash-1.start-3.txt", "crash-1.txt"]
    assert sorted(path.name for path in (run / "stacks").iterdir()) == starts
    mark.unlink()
    assert memfit("run", file, "--out", run, "--resume").returncode == 0
    assert not (run / "stacks").exists()


@pytest.mark.slow
def test_a_killed_rank_is_started_again_and_the_run_ends_bit_for_bit_as_undisturbed(tmp_path):
    result, torn = tmp_path / "whole", tmp_path / "torn"
    undisturbed = memfit("run", plan(tmp_path), "--out", result, "--json")
    assert undisturbed.returncode == 0, undisturbed.stderr
    assert "16 = 2 devices x (1 x 5 + 3), ddp, mesh data 2" in undisturbed.stderr
    assert "50 samples, 4 optimizer steps an epoch" in undisturbed.stderr
    torchrun_env = [
        "run", plan(tmp_path, "--set", f"killed={tmp_path}/killed"), "--out", torn, "--save-every", 0,
    ]  # fmt: skip
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--max-restarts", "1"]
    disturbed = memfit(*torchrun_env, launcher=torchrun)
    assert disturbed.returncode == 0, disturbed.stderr
    assert "frame #" not in disturbed.stderr
    assert (tmp_path / "killed").exists()

    a, b = load_file(result / "final" / "net.safetensors"), load_file(torn / "final" / "net.safetensors")
    assert all(torch.equal(a[name], b[name]) for name in a)
    assert lines(result, "samples") == lines(torn, "samples")
    applied = [(line["window"], line["rank"]) for line in lines(torn, "samples")]
    assert applied == [(window, rank) for window in range(6) for rank in (0, 1)]
    epoch = [i for line in lines(torn, "samples")[:8] for i in line["ids"]]
    assert sorted(epoch) == list(range(50))
    assert [line["global_batch_done"] for line in lines(torn, "metrics")] == [16, 16, 16, 2, 16, 16]
    assert len(lines(torn, "metrics")[0]["measured_process_bytes_of_ranks"]) == 2


def test_ranks_with_other_data_sets_stop_with_the_numbers_of_each(tmp_path):
    stopped = memfit("run", plan(tmp_path, name="Torn"), "--out", tmp_path / "run")
    assert stopped.returncode == 2
    assert stopped.stderr.count("rank 0: 50; rank 1: 40") == 1
    assert "Traceback" not in stopped.stderr


@pytest.mark.slow
def test_a_rank_that_hangs_is_named_and_the_stacks_of_all_are_kept(tmp_path):
    run = tmp_path / "run"
    ended = memfit("run", plan(tmp_path, name="Hangs"), "--out", run, "--patience", 5)
    assert ended.returncode == 5, ended.stderr
    assert re.search(
        r"memfit: rank 1 has made no progress for \d+ s in forward of window \d, at .*net\.py:\d+ in loss\(\)",
        ended.stderr,
    )
    assert "rank 0 has made no progress" not in ended.stderr
    assert sorted(path.name for path in (run / "stacks").iterdir()) == ["rank-0.txt", "rank-1.txt"]
    assert "time.sleep(3600)" in (run / "stacks" / "rank-1.txt").read_text()


@pytest.mark.slow
def test_a_trial_spoiled_and_a_validation_failed_on_one_rank_are_agreed_on_by_all(tmp_path):
    run = tmp_path / "run"
    done = memfit("run", plan(tmp_path, name="Uneven"), "--out", run, "--windows", 4)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("starting again without a trial") == 1
    assert "slow.bias" in done.stderr
    validated = [line for line in lines(run, "metrics") if "validation" in line]
    assert [line["window"] for line in validated] == [1, 3]
    assert [line["validation_tries"] for line in validated] == [3, 1]
    assert validated[0]["validation"]["items"] < 5
    assert "rank 1: MemoryError: planted" in done.stderr


def test_a_plan_names_ddp_and_the_parts_of_its_ranks(tmp_path):
    made = read_plan(plan(tmp_path))
    assert (made.engine, made.micro_batches) == ("ddp", [[5, 3], [5, 3]])


@pytest.mark.parametrize("ranks", [2, 3, 5])
def test_a_window_holds_the_same_samples_on_any_number_of_ranks(ranks):
    for lengths in (None, [7 + (i * 37) % 60 for i in range(101)]):
        size = {"size": 101, "lengths": lengths, "global_batch": 400 if lengths else 16, "micro_batch": 90}
        first, many = Windows(**size), Windows(**size, ranks=ranks)
        assert first.per_epoch(0) == many.per_epoch(0)
        for number in range(first.per_epoch(0)):
            assert sorted(first.window(number).ids) == sorted(many.window(number).ids)
            if lengths is not None:
                micro_batches = many.window(number).micro_batches
                assert max(len(ids) * max(lengths[i] for i in ids) for ids in micro_batches) <= 90


def test_ranks_share_padded_units_and_not_counts():
    lengths = [100] * 4 + [10] * 40
    windows = Windows(size=44, lengths=lengths, global_batch=1000, micro_batch=200, ranks=2)
    loads = [
        sum(len(ids) * max(lengths[i] for i in ids) for ids in share) for share in windows.window(0).ranks
    ]  # fmt: skip
    assert abs(loads[0] - loads[1]) <= 0.04 * sum(loads)
