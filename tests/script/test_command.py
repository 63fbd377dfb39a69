"""A training command, taken apart."""

import sys
from pathlib import Path

import pytest

from memfit.errors import InputError
from memfit.script.command import parse_command
from memfit.script.launchers import resolved


@pytest.fixture(autouse=True)
def in_a_folder_with_a_script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "train.py").write_text("")
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize(
    "words",
    [
        "python train.py --lr 1", "python3 -u train.py --lr 1", "python -W ignore -O train.py --lr 1",
        "train.py --lr 1", "uv run python train.py --lr 1", f"{sys.executable} train.py --lr 1",
    ],
)  # fmt: skip
def test_a_script_with_its_arguments(words: str) -> None:
    command = parse_command(words.split())
    assert (command.target, command.args, command.is_module, command.world) == ("train.py", ("--lr", "1"), False, 1)


def test_a_module() -> None:
    command = parse_command(["python", "-m", "package.train", "x=1"])
    assert (command.target, command.is_module, command.args) == ("package.train", True, ("x=1",))


def test_variables_before_the_command_are_its_environment() -> None:
    command = parse_command(["CUDA_VISIBLE_DEVICES=0,1", "python", "train.py"])
    assert command.environment == {"CUDA_VISIBLE_DEVICES": "0,1"}


@pytest.mark.parametrize(
    ("words", "world", "local"),
    [
        ("torchrun --nproc_per_node=8 train.py --x", 8, "8"),
        ("torchrun --standalone --nproc-per-node 4 --nnodes 2 train.py --x", 8, "4"),
        ("python -m torch.distributed.launch --nproc_per_node 2 train.py --x", 2, "2"),
        ("torchrun --nproc_per_node gpu train.py --x", 1, "1"),
    ],
)
def test_torchrun_sets_the_ranks(words: str, world: int, local: str) -> None:
    command = parse_command(words.split())
    assert (command.target, command.args, command.world) == ("train.py", ("--x",), world)
    assert command.environment["WORLD_SIZE"] == str(world)
    assert command.environment["LOCAL_WORLD_SIZE"] == local
    assert command.environment["RANK"] == "0"


@pytest.mark.parametrize(
    "words",
    [
        "torchrun --nproc_per_node=x train.py", "torchrun --nproc-per-node 0 train.py",
        "torchrun --nnodes a:b train.py",
        "deepspeed --num_gpus=two train.py", "python -m torch.distributed.run --nproc_per_node= train.py",
    ],
)  # fmt: skip
def test_a_number_of_processes_that_is_none_is_refused(words: str) -> None:
    with pytest.raises(InputError, match="not a number of processes"):
        parse_command(words.split())


@pytest.mark.parametrize("given", ["--num_processes two train.py", "--no_such_option train.py", "--multi_gpu"])
def test_a_mistake_in_the_words_of_accelerate_is_told_in_one_line(given: str) -> None:
    with pytest.raises(InputError) as refused:
        resolved(parse_command(["accelerate", "launch", *given.split()]))
    assert refused.value.seen == "accelerate launch"
    assert "usage" not in refused.value.why
    assert "\n" not in refused.value.why


def test_deepspeed_gives_the_local_rank_as_an_argument() -> None:
    command = parse_command(["deepspeed", "--num_gpus", "4", "train.py", "--deepspeed", "ds.json"])
    assert (command.world, command.args) == (4, ("--local_rank=0", "--deepspeed", "ds.json"))


def test_accelerate_is_left_to_its_own_launcher() -> None:
    command = parse_command(["accelerate", "launch", "--mixed_precision", "bf16", "train.py"])
    assert (command.launcher, command.args) == ("accelerate", ("--mixed_precision", "bf16", "train.py"))


@pytest.mark.parametrize(
    "words", ["", "python", "python -c pass", "python missing.py", "ls -l", "accelerate test", "accelerate launch"]
)
def test_a_command_without_a_script_is_refused(words: str) -> None:
    with pytest.raises(InputError):
        parse_command(words.split())


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("python no.py", "script 'no.py': no such file; write the path of a Python script"),
        ("python ..", "script '..': a folder; write the path of a Python script"),
        ("python train.ipynb", "script 'train.ipynb': a notebook; write jupyter nbconvert --to script train.ipynb"),
    ],
)
def test_what_is_no_script_is_refused_by_its_kind(words: str, said: str) -> None:
    Path("train.ipynb").write_text("{}")
    with pytest.raises(InputError) as refused:
        parse_command(words.split())
    assert said in str(refused.value)
