"""Plans, run folders and checkpoints that are wrong: one line, exit code 2, and nothing is touched.

pytest tests/cli/test_bad_plans.py
"""

import json
import os
import pickle
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.cli.asking import AT, JOBS, RIGHT, ROOT, Run, is_one_line, really

CHANGES = {
    "not TOML": ("global_batch = 8", "global_batch = = 8", "not valid TOML"),
    "cut short": ('unit = "samples"', 'unit = "sam\n', "not valid TOML"),
    "no version": ("memfit_plan = 1\n", "", "no memfit_plan version"),
    "a plan of another version": (
        "memfit_plan = 1",
        "memfit_plan = 2",
        "it is of version 2, and this memfit reads version 1",
    ),
    "a key that is missing": ("seed = 0\n", "", "the key seed is missing"),
    "an unknown key": ("seed = 0", "sede = 0", "write seed"),
    "a key of another type": ("global_batch = 8", 'global_batch = "8"', "not a whole number"),
    "a number for a text": ('device = "cpu"', "device = 3", "not a text"),
    "true for a number": ("seed = 0", "seed = true", "not a whole number"),
    "sizes that do not add up": ("global_batch = 8", "global_batch = 9", "micro_batches sum to 8"),
    "a negative size": ("        2,\n", "        -2,\n", "not a list of whole numbers"),
    "a size above the micro-batch": ("micro_batch = 3", "micro_batch = 2", "a micro-batch of 3"),
    "a negative budget": ("budget_bytes = ", "budget_bytes = -", "less than 1"),
    "a negative seed": ("seed = 0", "seed = -1", "less than 0"),
    "a seed beyond 64 bits": ("seed = 0", f"seed = {2**64}", f"more than {2**63 - 1}"),
    "a warm-up beyond 64 bits": ("warmup_windows = 0", f"warmup_windows = {10**400}", f"more than {2**63 - 1}"),
    "a number of 5000 digits": ("seed = 0", f"seed = {'9' * 5000}", "a whole number has too many digits"),
    "lists nested deeply": ("stages = []", f"stages = {'[' * 9000}{']' * 9000}", "nested too deeply"),
    "a time that is none": (
        "step_seconds = ",
        "step_seconds = nan # ",
        "step_seconds = nan: not a number of 0 or more",
    ),
    "an unknown precision": ('precision = "fp32"\nseed', 'precision = "fp8"\nseed', "precision = 'fp8'"),
    "two precisions": ('precision = "fp32"\nseed', 'precision = "bf16"\nseed', "make them agree"),
    "an unknown engine": ('engine = "single"', 'engine = "tripple"', "write single"),
    "an unknown mode": ("[checkpointing]", '[checkpointing]\nnet = "keeps"', "write keep"),
    "an option of other keys": ("applied = true", "took = true", "options"),
    "a stage that is none": ("stages = []", "stages = [{ modules = 3 }]", "stages: {'modules': 3} is not a table of"),
    "an unknown place": ('where = "here"', 'where = "hear"', "write here"),
    "a policy of other keys": ('gradients = "free"', 'gradient = "free"', "write gradients"),
    "an unknown wait": ('idle_nets = "keep"', 'idle_nets = "host"', "idle_nets"),
    "a mesh of an unknown dimension": ("[mesh]\n", "[mesh]\ndp_shrad = 2\n", "write dp_shard=2"),
    "a mesh of other ranks": ("[mesh]\n", "[mesh]\ndp_shard = 2\n", "it has 2 data-parallel ranks, and micro_batches"),
    "a phase that is none": ("[phases.train]", "[phases]\nvalidate = 3\n[phases.train]", "phases.validate"),
}


@pytest.mark.parametrize(("old", "new", "words"), CHANGES.values(), ids=CHANGES)
def test_plans(run: Run, tmp_path: Path, plan: str, old: str, new: str, words: str) -> None:
    assert old in plan
    (tmp_path / "plan.toml").write_text(plan.replace(old, new, 1))
    is_one_line(run("run", f"{tmp_path}/plan.toml", "--out", f"{tmp_path}/run"), "plan file", words)
    is_one_line(run(*AT, "--checkpoint", f"{tmp_path}/plan.toml", "--json"), "plan file", words)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        (
            "budget_bytes = ",
            "budget_bytes = 2000000 #",
            "needs 24.0 MiB by its own prediction, 24.0 MiB of it for what",
        ),
        ("process_bytes = ", "process_bytes = 268435456 #", "by its own prediction"),
    ],
)
def test_a_plan_that_needs_more_than_its_budget(
    run: Run, tmp_path: Path, plan: str, old: str, new: str, words: str
) -> None:
    (tmp_path / "plan.toml").write_text(plan.replace(old, new, 1))
    is_one_line(run("run", f"{tmp_path}/plan.toml", "--out", f"{tmp_path}/run"), "plan file", "budget_bytes", words)
    assert not (tmp_path / "run").exists()


def test_a_plan_that_counts_something_else_than_its_job(run: Run, tmp_path: Path, plan: str) -> None:
    (tmp_path / "plan.toml").write_text(plan.replace('unit = "samples"', 'unit = "frames"', 1))
    is_one_line(run("run", f"{tmp_path}/plan.toml", "--out", f"{tmp_path}/run"), "in frames", "the job counts samples")


def test_a_plan_that_is_no_text(run: Run, tmp_path: Path) -> None:
    (tmp_path / "plan.toml").write_bytes(bytes(range(256)))
    is_one_line(run("run", f"{tmp_path}/plan.toml", "--out", f"{tmp_path}/run"), "cannot be read: not text")


def test_a_plan_that_is_a_folder(run: Run, tmp_path: Path) -> None:
    is_one_line(run("run", str(tmp_path), "--out", f"{tmp_path}/run"), "cannot be read: Is a directory")


# ---- runs


def test_no_such_plan(run: Run, tmp_path: Path) -> None:
    is_one_line(run("run", f"{tmp_path}/none.toml", "--out", f"{tmp_path}/run"), "No such file or directory")


def test_no_windows(run: Run, tmp_path: Path, plan_file: Path) -> None:
    is_one_line(run("run", str(plan_file), "--out", f"{tmp_path}/run", "--windows", "0"), "--windows '0'")


def test_a_folder_that_is_not_empty(run: Run, tmp_path: Path, plan_file: Path) -> None:
    (tmp_path / "note.txt").write_text("mine")
    is_one_line(run("run", str(plan_file), "--out", str(tmp_path)), "it is not empty", "--resume")
    assert [path.name for path in tmp_path.iterdir()] == ["note.txt"]


def test_a_folder_that_cannot_be_written(run: Run, plan_file: Path) -> None:
    is_one_line(run("run", str(plan_file), "--out", "/proc/no/run"), "run folder /proc/no/run", "cannot be written")


def test_a_folder_that_is_a_file(run: Run, tmp_path: Path, plan_file: Path) -> None:
    (tmp_path / "run").write_text("")
    is_one_line(run("run", str(plan_file), "--out", f"{tmp_path}/run"), "run")


def test_resumed_with_another_plan(run: Run, tmp_path: Path, plan: str, plan_file: Path) -> None:
    (tmp_path / "plan.toml").write_text(plan.replace("seed = 0", "seed = 1"))
    answer = run("run", str(plan_file), "--out", str(tmp_path), "--resume")
    is_one_line(answer, "it is not empty, and no run has written into it", "write --out as the folder of the run")
    (tmp_path / ".memfit-run").touch()
    answer = run("run", str(plan_file), "--out", str(tmp_path), "--resume")
    is_one_line(answer, "its seed is 0", f"{tmp_path}/plan.toml was run with 1", "write another --out")


def changed(plan: str, tmp_path: Path, *changes: tuple[str, str]) -> str:
    for old, new in changes:
        assert old in plan
        plan = plan.replace(old, new)
    (tmp_path / "changed.toml").write_text(plan)
    return f"{tmp_path}/changed.toml"


def of_job(name: str) -> tuple[str, str]:
    return RIGHT, f"{JOBS}:{name}"


TRAINED = {
    "a plan for another kind of device": ([('device = "cpu"', 'device = "t4"')], ["plan for t4", "no CUDA device"]),
    "a plan for an unknown device": ([('device = "cpu"', 'device = "gpu"')], ["plan for gpu", "no CUDA device"]),
    "an unknown setting": ([("width = 8", "widht = 8")], ["setting 'widht'", "write width="]),
    "a job that is gone": ([of_job("Gone")], ["has no Gone"]),
    "no data set": ([of_job("NoDataset")], ["the job has no dataset()"]),
    "an empty data set": ([of_job("DatasetEmpty")], ["data set of 0 samples"]),
    "a data set that raises": ([of_job("DatasetRaises")], ["in dataset()", "FileNotFoundError"]),
    "a data set that is a number": ([of_job("DatasetANumber")], ["DatasetANumber.dataset()", "gave int"]),
    "lengths of fewer": ([of_job("LengthsOfFewer")], ["5 lengths", "12 samples"]),
    "samples of unknown length": (
        [of_job("LengthsOfNone")],
        ["LengthsOfNone.lengths(): None", "each would count as one", "write lengths(self) ->"],
    ),
    "a sample longer than a micro-batch": (
        [of_job("SampleTooLong")],
        ["sample 11 of length 9", "longer than a micro-batch of 3"],
    ),
}


@pytest.mark.skipif(torch.cuda.is_available(), reason="its plan for a T4 would be tried")
@pytest.mark.parametrize(("changes", "words"), TRAINED.values(), ids=TRAINED)
def test_trained(
    run: Run,
    capfd: pytest.CaptureFixture[str],
    tmp_path: Path,
    plan: str,
    changes: list[tuple[str, str]],
    words: list[str],
) -> None:
    """The training process's own main, in this process: it finds these before it limits its memory."""
    from memfit.train.launch.worker import main as child
    from memfit.train.run_options import RunOptions

    shutil.copy(changed(plan, tmp_path, *changes), tmp_path / "plan.toml")
    try:
        code = child(RunOptions(folder=str(tmp_path)))
    finally:
        torch.distributed.destroy_process_group()
    is_one_line((code, *capfd.readouterr()), *words)


@pytest.fixture(scope="module")
def trained(plan_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run of two windows."""
    folder = tmp_path_factory.mktemp("runs") / "run"
    code, out, err = really("run", str(plan_file), "--out", str(folder), "--windows", "2", "--json")
    assert code == 0, err
    assert json.loads(out)["windows"] == 2
    return folder


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 0x55
    path.write_bytes(content)


TENSORS, MANIFEST = "state.safetensors", "manifest.json"
CHECKPOINTS: dict[str, tuple[Callable[[Path], object], str]] = {
    "torn": (lambda path: os.truncate(path / TENSORS, 700), "state.safetensors has 700 bytes"),
    "empty": (lambda path: (path / TENSORS).write_bytes(b""), "state.safetensors has 0 bytes"),
    "without its tensors": (lambda path: (path / TENSORS).unlink(), "state.safetensors cannot be read: No such file"),
    "without its manifest": (lambda path: (path / MANIFEST).unlink(), "it has no manifest.json"),
    "with a torn manifest": (lambda path: os.truncate(path / MANIFEST, 700), "manifest.json was changed"),
    "with a byte flipped": (lambda path: flip(path / TENSORS), "state.safetensors was changed"),
    "with a byte of its manifest flipped": (lambda path: flip(path / MANIFEST), "manifest.json was changed"),
    "with a byte of its plan flipped": (lambda path: flip(path / "plan.toml"), "plan.toml was changed"),
    "a pickle that holds code": (lambda path: (path / TENSORS).write_bytes(pickle.dumps(print)), "is a pickle"),
    "a manifest that is a pickle": (lambda path: torch.save({"a": print}, path / MANIFEST), "is a pickle"),
}


@pytest.mark.parametrize(("spoil", "words"), CHECKPOINTS.values(), ids=CHECKPOINTS)
def test_checkpoints(tmp_path: Path, trained: Path, spoil: Callable[[Path], object], words: str) -> None:
    """Reading alone, in this process: refused, named, and the newest whole one is found behind it."""
    from memfit.errors import InputError
    from memfit.train.checkpoint.checkpoints import Checkpoints, read_checkpoint

    for number in (1, 2):
        shutil.copytree(trained / "checkpoints" / "00000002", tmp_path / f"{number:08d}")
    path, said = tmp_path / "00000002", []
    assert read_checkpoint(path).next_window == 2
    spoil(path)
    with pytest.raises(InputError, match=f"checkpoint {path}: it is torn or no checkpoint: .*{words}.*; take another"):
        read_checkpoint(path)
    checkpoint = Checkpoints(tmp_path).newest(said.append)
    assert checkpoint is not None
    assert checkpoint.path == tmp_path / "00000001"
    assert len(said) == 2
    assert words in said[0]
    assert f"going on from window 2, with {checkpoint.path}" in said[1]


def test_a_checkpoint_of_another_job(trained: Path) -> None:
    from memfit.apply.train_state import build
    from memfit.errors import InputError
    from memfit.loading import load_job
    from memfit.train.checkpoint.checkpoints import read_checkpoint
    from memfit.train.checkpoint.resume import restore

    path = trained / "checkpoints" / "00000002"
    train_state = build(load_job("testing/nets.py:Gan"), "cpu")
    with pytest.raises(InputError, match=f"checkpoint {path}: it is of another job: .*net.*generator"):
        restore(train_state, read_checkpoint(path))


def test_a_torn_checkpoint_for_real(tmp_path: Path, trained: Path, plan_file: Path) -> None:
    folder = tmp_path / "run"
    shutil.copytree(trained, folder)
    for other in (folder / "checkpoints").iterdir():
        if other.name != "00000002":
            shutil.rmtree(other)
    CHECKPOINTS["torn"][0](folder / "checkpoints" / "00000002")
    answer = really("run", str(plan_file), "--out", str(folder), "--resume", "--windows", "3", "--json")
    is_one_line(answer, "checkpoints ", "00000002: it is torn", "start a new run in another --out")


REAL = {
    "LossTurnsNaN": ["window 0", "not a finite number"],
    "SamplesDoNotCollate": ["collate", "write collate(self, samples)"],
}


WITHOUT_TORCH = """
import sys
from memfit.cli import main
try:
    main(sys.argv[1:])
finally:
    import memfit.show.run_log  # which writes the summary of a run that is done
    print("imported torch" if "torch" in sys.modules else "", end="")
"""


@pytest.mark.parametrize(("name", "words"), REAL.items(), ids=REAL)
def test_trained_for_real(tmp_path: Path, plan: str, name: str, words: list[str]) -> None:
    """And what starts the training process imports no torch before it, which takes seconds."""
    path = changed(plan, tmp_path, of_job(name))
    asked = ["run", path, "--out", f"{tmp_path}/run", "--windows", "1", "--json"]
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", WITHOUT_TORCH, *asked], capture_output=True, text=True, cwd=ROOT
    )
    is_one_line((done.returncode, done.stdout, done.stderr), *words)
