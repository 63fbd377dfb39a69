"""``memfit plan SCRIPT``: a script is traced, and its edits are written in the words of a trainer.

pytest tests/cli/test_plan_of_script.py
"""

import json
from pathlib import Path

import pytest

from memfit.script.command_line import is_command_line, parse_command_line
from tests.cli.asking import Run

SCRIPT = """
import torch
from torch import nn
net = nn.Sequential(*(nn.Sequential(nn.Linear(256, 1024), nn.GELU(), nn.Linear(1024, 256)) for _ in range(4))).cuda()
optimizer = torch.optim.AdamW(net.parameters())
for _ in range(4):
    net(torch.randn(4096, 256).cuda()).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def test_a_script_is_traced_and_its_edits_are_a_trainers_arguments(run: Run, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    code, out, _ = run("plan", f"{tmp_path}/train.py", "--device", "t4", "--for", "lightning", "--json")
    assert code == 0
    options = json.loads(out)["devices"]["t4"]["options"]
    assert any((option["for"] or "").startswith("Trainer(") for option in options)
    assert all(option["saves_bytes"] is None or option["saves_bytes"] > 0 for option in options)


def test_which_texts_are_scripts() -> None:
    for text in ("train.py", "dir/train.py --lr 1", "torchrun --nproc-per-node 2 train.py", "python -m package"):
        assert is_command_line(text), text
    for text in ("train.py:Job", "latentsync/tiny", "package.module:Name", "", "python"):
        assert not is_command_line(text), text


def test_a_launchers_ranks_get_their_variables(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("")
    command = parse_command_line(f"torchrun --nproc-per-node 2 {tmp_path}/train.py")
    assert (command.world, command.environment["WORLD_SIZE"], command.environment["LOCAL_WORLD_SIZE"]) == (2, "2", "2")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("no.py",), "no such file"),
        (("train.py 'a",), "not a command (No closing quotation)"),
        (("train.py", "--global-batch", "8"), "a script sets its batch itself"),
        (("train.py", "--micro-batch", "8"), "--micro-batch with train.py: it is an option of jobs"),
        (("train.py", "--out", "plan.toml"), "--out with train.py: it is an option of jobs"),
        (("train.py", "--for", "slurm"), "write one of deepspeed, accelerate, lightning, transformers, torchtitan"),
    ],
)
def test_wrong_use_is_one_line(run: Run, words: tuple[str, ...], said: str) -> None:
    code, _, line = run("plan", *words)
    assert code == 2
    assert said in line
    assert line.count("\n") == 1


@pytest.mark.parametrize(
    ("text", "said"),
    [("raise ValueError('boo')", "the script failed: ValueError: boo"), ("x = 1", "write job.py:Name")],
)
def test_a_script_without_steps_is_one_line(run: Run, tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "job.py").write_text(text)
    code, _, line = run("plan", f"{tmp_path}/job.py", "--device", "t4")
    assert code == 2
    assert said in line.replace(f"{tmp_path}/", "")
    assert len([each for each in line.splitlines() if each.startswith("memfit: ")]) == 1
