"""Scripts as people write them, through the command line."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.script.script_trace import trace_here

SAMPLES = Path(__file__).parent / "samples"
ROOT = Path(__file__).parents[2]


def traced(folder: Path, *words: str, options: tuple[str, ...] = ()) -> tuple[int, dict[str, Any], str]:
    """(exit code, the JSON, what was printed)."""
    command = [sys.executable, "-m", "memfit", "trace", "--json", "answer.json", *options, "--", "python", *words]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "COLUMNS": "160"}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=200)
    answer = folder / "answer.json"
    return done.returncode, json.loads(answer.read_text()) if answer.exists() else {}, done.stdout + done.stderr


def test_an_unmodified_script_is_answered_with_its_phases_lines_and_cards(tmp_path: Path) -> None:
    (tmp_path / "last.pt").write_text("an older checkpoint")
    code, answer, said = traced(tmp_path, str(SAMPLES / "plain_loop.py"), options=("--device", "rtx4090"))
    assert code == 0, said
    assert said.startswith("Fits on RTX 4090") or "\nFits on RTX 4090" in said
    assert list(answer["phases"]) == ["train", "validate", "save"]
    weights = 4 * (256 * 1024 + 1024 + 1024 * 1024 + 1024 + 1024 * 10 + 10)
    assert answer["phases"]["train"]["categories"]["parameters"] == weights
    assert answer["phases"]["train"]["categories"]["optimizer"] == pytest.approx(2 * weights, rel=0.001)
    assert answer["phases"]["train"]["allocated_bytes"] >= 4 * weights
    assert {Path(line["file"]).name for line in answer["lines"]} == {"plain_loop.py"}
    assert {"file", "line", "bytes", "tensors", "library_line"} <= answer["lines"][0].keys()
    assert {card["name"] for card in answer["cards"]} >= {"rtx4090", "h100"}
    assert [Path(change["path"]).name for change in answer["files_not_written"]] == ["last.pt"]
    assert (tmp_path / "last.pt").read_text() == "an older checkpoint"
    assert answer["sandboxed"] is True


SCRIPT_WITHOUT_STEPS = "import torch\nnet = torch.nn.Linear(4, 4).cuda()\nnet(torch.ones(2, 4).cuda())\n"
MISSING_PACKAGE = "import torch\nimport surely_not_installed.part\n"
FAILING = "import torch\ndef inner():\n    raise ValueError('mine')\ninner()\n"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("script", "code", "says"),
    [
        (SCRIPT_WITHOUT_STEPS, 4, "No verdict"),
        (MISSING_PACKAGE, 2, "--stub surely_not_installed"),
        (FAILING, 2, "ValueError: mine"),
    ],
)
def test_a_script_that_cannot_be_answered_says_why(tmp_path: Path, script: str, code: int, says: str) -> None:
    (tmp_path / "train.py").write_text(script)
    answer, _, said = traced(tmp_path, "train.py")
    assert answer == code, said
    assert says in said
    assert "memfit/script" not in said


@pytest.mark.slow
def test_a_sample_that_shares_the_trained_net_belongs_to_the_window(tmp_path: Path) -> None:
    code, answer, said = traced(tmp_path, str(SAMPLES / "shared_sampling.py"))
    assert code == 0, said
    assert list(answer["phases"]) == ["train"]


@pytest.mark.slow
def test_retained_logits_are_named_with_the_bytes_that_freeing_them_saves(tmp_path: Path) -> None:
    code, answer, said = traced(tmp_path, str(SAMPLES / "retained_logits.py"))
    assert code == 0, said
    logits = 4 * 64 * 5000 * 4
    assert [kept["bytes"] for kept in answer["kept"] if kept["name"] == "logits"] == [logits]
    assert [option["saves_bytes"] for option in answer["options"] if option["name"] == "free logits"] == [logits]


@pytest.mark.slow
def test_attempts_that_ran_out_of_memory_do_not_count(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(
        "import torch\n"
        "from accelerate.utils import find_executable_batch_size\n"
        "@find_executable_batch_size(starting_batch_size=64)\n"
        "def train(size):\n"
        "    print('trying', size)\n"
        "    net = torch.nn.Linear(1024, 1024).cuda()\n"
        "    optimizer = torch.optim.SGD(net.parameters(), 0.1)\n"
        "    for _ in range(3):\n"
        "        net(torch.randn(size * 1024, 1024, device='cuda')).square().mean().backward()\n"
        "        optimizer.step()\n"
        "train()\n"
    )
    code, answer, said = traced(tmp_path, "train.py", options=("--memory", "1GiB"))
    size = int(said.split("trying ")[-1].split()[0])
    assert size < 64
    assert code in (0, 3), said
    assert answer["failed_attempts"] > 0
    rows = 4 * 1024 * 1024 * size
    assert 2 * rows <= answer["phases"]["train"]["allocated_bytes"] < 1 << 30


@pytest.mark.slow
def test_the_largest_batch_is_traced_itself(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(
        "import sys, torch\n"
        "net = torch.nn.Linear(4096, 4096).cuda()\n"
        "optimizer = torch.optim.SGD(net.parameters(), 0.1)\n"
        "for _ in range(3):\n"
        "    net(torch.randn(int(sys.argv[1]) * 1024, 4096, device='cuda')).square().mean().backward()\n"
        "    optimizer.step()\n"
    )
    code, answer, said = traced(tmp_path, "train.py", "{batch}", options=("--memory", "2GiB"))
    assert code == 0, said
    largest = answer["largest_batch"]
    assert largest["verified"]
    assert largest["process_bytes"] <= 2 << 30


@pytest.mark.slow
def test_a_launcher_and_ddp(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(
        "import os, torch, torch.distributed as dist\n"
        "from torch.nn.parallel import DistributedDataParallel as DDP\n"
        "dist.init_process_group('nccl')\n"
        "rank = int(os.environ['LOCAL_RANK'])\n"
        "torch.cuda.set_device(rank)\n"
        "net = DDP(torch.nn.Linear(1024, 1024).cuda(rank), device_ids=[rank])\n"
        "optimizer = torch.optim.Adam(net.parameters())\n"
        "for step in range(4):\n"
        "    with net.no_sync():\n"
        "        net(torch.randn(8, 1024).cuda(rank)).sum().backward()\n"
        "    net(torch.randn(8, 1024).cuda(rank)).sum().backward()\n"
        "    optimizer.step(); optimizer.zero_grad()\n"
        "assert dist.get_world_size() == 8\n"
    )
    options = ("--world", "8")
    code, answer, said = traced(tmp_path, "train.py", options=options)
    assert code == 0, said
    assert answer["world"] == 8
    assert answer["phases"]["train"]["allocated_bytes"] >= 5 * 4 * 1024 * 1024


@pytest.mark.slow
def test_an_assumed_value_is_named_by_its_line_and_can_be_given(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(
        "import torch\n"
        "net = torch.nn.Linear(64, 64).cuda()\n"
        "optimizer = torch.optim.SGD(net.parameters(), 0.1)\n"
        "for _ in range(3):\n"
        "    loss = net(torch.randn(8, 64).cuda()).sum()\n"
        "    loss.backward()\n"
        "    optimizer.step()\n"
        "    if loss.item() > 7:\n"
        "        print('above seven')\n"
    )
    _, answer, said = traced(tmp_path, "train.py")
    assert [(item["where"].rpartition("/")[2], item["answer"]) for item in answer["assumed"]] == [("train.py:8", "0.5")]
    assert "above seven" not in said
    _, answer, said = traced(tmp_path, "train.py", options=("--assume", "train.py:8=9"))
    assert answer["assumed"][0]["answer"] == "9.0"
    assert "above seven" in said


@pytest.mark.slow
def test_fully_sharded_nets_hold_their_part_of_the_state(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(
        "import os, torch, torch.distributed as dist\n"
        "from torch.distributed.device_mesh import init_device_mesh\n"
        "from torch.distributed.fsdp import fully_shard\n"
        "dist.init_process_group('nccl')\n"
        "mesh = init_device_mesh('cuda', (dist.get_world_size(),))\n"
        "with torch.device('meta'):\n"
        "    net = torch.nn.Sequential(*[torch.nn.Linear(1024, 1024) for _ in range(8)])\n"
        "for block in net:\n"
        "    fully_shard(block, mesh=mesh)\n"
        "fully_shard(net, mesh=mesh)\n"
        "net.to_empty(device='cuda')\n"
        "for block in net:\n"
        "    block.reset_parameters()\n"
        "optimizer = torch.optim.AdamW(net.parameters())\n"
        "for _ in range(4):\n"
        "    net(torch.randn(8, 1024, device='cuda')).sum().backward()\n"
        "    optimizer.step()\n"
        "    optimizer.zero_grad()\n"
    )
    code, answer, said = traced(tmp_path, "train.py", options=("--world", "8"))
    assert code == 0, said
    state = 8 * 4 * (1024 * 1024 + 1024) // 8
    categories = answer["phases"]["train"]["categories"]
    assert categories["optimizer"] == pytest.approx(2 * state, rel=0.001)


def test_memory_that_is_gone_before_the_first_step_is_a_verdict_and_no_traceback(tmp_path: Path) -> None:
    code, answer, said = traced(
        tmp_path, str(SAMPLES / "plain_loop.py"), options=("--device", "rtx4090", "--memory", "8MiB")
    )
    assert code == 3, said
    assert "Traceback" not in said
    assert "Does not fit on RTX 4090" in said
    assert answer["fits"] is False


def test_a_script_that_spawns_more_ranks_than_are_simulated_is_told_the_most(tmp_path: Path) -> None:
    script = (
        "import torch.distributed as dist, torch.multiprocessing as mp\n"
        "def train(rank, world):\n"
        "    dist.init_process_group('nccl', rank=rank, world_size=world)\n"
        "mp.spawn(train, args=(99999999,), nprocs=99999999)\n"
    )
    error = trace_here(tmp_path, script).error
    assert error is not None
    assert error.summary.startswith("init_process_group(world_size=99999999): memfit simulates at most ")


def test_a_file_of_the_current_folder_hides_no_module_of_the_traced_process(tmp_path: Path) -> None:
    (tmp_path / "json.py").write_text("raise RuntimeError('hidden')")
    scripts = tmp_path / "scripts"
    scripts.mkdir()
    (scripts / "train.py").write_text((SAMPLES / "plain_loop.py").read_text())
    memfit = str(Path(sys.executable).with_name("memfit"))  # python -m would look into the current folder itself
    command = [memfit, "trace", "--device", "rtx4090", "--", "python", "scripts/train.py"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("Fits on"), done.stdout


@pytest.mark.parametrize("where", ["cpu", "cuda"])
def test_products_that_are_written_into_a_buffer_take_no_bytes_of_their_own(tmp_path: Path, where: str) -> None:
    """The first of the loss's tiles took a second buffer on the CPU; on a card, torch's count of operations for the
    last one raised in the script (torch.addmm with out_dtype)."""
    options = ("--device", "cpu" if where == "cpu" else "rtx4090")
    code, answer, said = traced(tmp_path, str(SAMPLES / "tiled_head.py"), where, options=options)
    assert code == 0, said
    buffer = (4 if where == "cpu" else 2) * 512 * 4096
    assert buffer <= answer["phases"]["train"]["categories"]["temporaries"] < 1.2 * buffer


GENERATES = """
import torch
from transformers import LlamaConfig, LlamaForCausalLM
net = LlamaForCausalLM(LlamaConfig(
    vocab_size=50, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2, eos_token_id=3,
)).cuda()
optimizer = torch.optim.SGD(net.parameters(), 0.1)
for _ in range(2):
    tokens = torch.randint(4, 50, (4, 10)).cuda()
    made = net.generate(tokens, max_new_tokens=6, do_sample=True, eos_token_id=3, pad_token_id=0)
    assert made.shape == (4, 16), made.shape
    calls = []
    hook = net.register_forward_pre_hook(lambda net, given: calls.append(given))
    net.generate(tokens, max_new_tokens=6, num_beams=2, early_stopping=True, eos_token_id=3, pad_token_id=0)
    assert len(calls) == 6, len(calls)
    hook.remove()
    net(made, labels=made).loss.backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def test_a_text_that_is_generated_ends_at_its_largest_length(tmp_path: Path) -> None:
    """It went on for ever: whether a row ended by its last token is not known, and at the largest length all do. A
    search over beams ended after its first token."""
    (tmp_path / "train.py").write_text(GENERATES)
    code, answer, said = traced(tmp_path, "train.py", options=("--device", "rtx4090", "--limit", "120s"))
    assert code == 0, said
    assert answer["windows"] == 2
