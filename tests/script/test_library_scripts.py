"""Scripts that use what a trace has to stand in for: kernels compiled for the card, lazy modules, packed sequences."""

from pathlib import Path

import pytest

from tests.script.test_trace_script import traced

MIB = 1 << 20

LOOP = "for step in range(5):\n    {loss}.backward()\n    optimizer.step()\n    optimizer.zero_grad()\n"
OPTIMIZER = "optimizer = torch.optim.SGD(net.parameters(), 0.1)\n"

FLEX = (
    "import torch\n"
    "from torch.nn.attention.flex_attention import create_block_mask, flex_attention\n"
    "attend = torch.compile(flex_attention)\n"
    "mask = create_block_mask(lambda b, h, q, k: q >= k, None, None, 4096, 4096, device='cuda')\n"
    "net = torch.nn.Linear(64, 64).cuda()\n" + OPTIMIZER
    + LOOP.format(loss="attend(*[net(torch.randn(1, 8, 4096, 64, device='cuda'))] * 3, block_mask=mask).sum()")
)  # fmt: skip
LAZY = (
    "import torch\n"
    "net = torch.nn.Sequential(torch.nn.LazyConv2d(8, 3), torch.nn.LazyBatchNorm2d(), torch.nn.Flatten(),\n"
    "                          torch.nn.LazyLinear(100)).to('cuda')\n"
    "net(torch.zeros(2, 3, 32, 32, device='cuda'))\n" + OPTIMIZER
    + LOOP.format(loss="net(torch.randn(2, 3, 32, 32, device='cuda')).sum()")
)  # fmt: skip
PACKED = (
    "import torch\n"
    "from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence\n"
    "net = torch.nn.LSTM(16, 32, batch_first=True).cuda()\n"
    "lengths = torch.tensor([3, 9, 5]).cuda()\n" + OPTIMIZER
    + "def loss():\n"
    "    packed = pack_padded_sequence(torch.randn(3, 9, 16).cuda(), lengths.cpu(), True, enforce_sorted=False)\n"
    "    assert packed.data.shape == (17, 16) and packed.batch_sizes.tolist() == [3, 3, 3, 2, 2, 1, 1, 1, 1]\n"
    "    out, back = pad_packed_sequence(net(packed)[0], batch_first=True)\n"
    "    assert out.shape == (3, 9, 32) and back.tolist() == [3, 9, 5]\n"
    "    return out.sum()\n"
    + LOOP.format(loss="loss()")
)  # fmt: skip
SHARDED_SAVE = (
    "import torch, torch.distributed.checkpoint as dcp\n"
    "net = torch.nn.Linear(64, 64).cuda()\n" + OPTIMIZER + LOOP.format(loss="net(torch.ones(2, 64).cuda()).sum()")
    + "dcp.save({'net': net.state_dict()}, checkpoint_id='sharded')\n"
)  # fmt: skip
CUDA_GRAPH = (
    "import torch\n"
    "net = torch.nn.Linear(64, 64).cuda()\n" + OPTIMIZER + LOOP.format(loss="net(torch.ones(2, 64).cuda()).sum()")
    + "graph = torch.cuda.CUDAGraph()\n"
    "with torch.cuda.graph(graph):\n"
    "    net(torch.ones(2, 64).cuda())\n"
)  # fmt: skip


def written(folder: Path, text: str) -> str:
    (folder / "train.py").write_text(text)
    return "train.py"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "noted"),
    [("", "inductor plans for it; not validated"), (", options={'max_autotune': True}", "FlexAttention was traced as")],
)
def test_flex_attention_keeps_no_scores(options: str, noted: str, tmp_path: Path) -> None:
    script = FLEX.replace("compile(flex_attention)", f"compile(flex_attention{options})")
    code, answer, said = traced(tmp_path, written(tmp_path, script))
    assert code == 0, said
    assert answer["phases"]["train"]["allocated_bytes"] < 4096 * 4096 * 8
    assert any(noted in line for line in answer["not_seen"])


@pytest.mark.slow
def test_a_triton_kernel_that_is_an_operator_does_nothing(tmp_path: Path) -> None:
    start = "start(kernel_idx=0, constant_args_idx=0, grid=[(1,)], tma_descriptor_metadata={}, kwargs={'out': out})\n"
    script = (
        "import torch\n"
        "from torch._higher_order_ops.triton_kernel_wrap import triton_kernel_wrapper_mutation as start\n"
        "net = torch.nn.Linear(64, 64).cuda()\n" + OPTIMIZER + "out = torch.zeros(4, device='cuda')\n"
        + LOOP.format(loss="net(torch.ones(2, 64).cuda()).sum()") + f"    {start}"
    )  # fmt: skip
    code, _, said = traced(tmp_path, written(tmp_path, script))
    assert code == 0, said


@pytest.mark.slow
def test_lazy_modules_get_their_shapes_on_the_card(tmp_path: Path) -> None:
    code, answer, said = traced(tmp_path, written(tmp_path, LAZY))
    assert code == 0, said
    weights = 4 * (8 * 3 * 9 + 8 + 8 + 8 + 8 * 30 * 30 * 100 + 100)
    assert answer["phases"]["train"]["categories"]["parameters"] == weights


@pytest.mark.slow
def test_packed_sequences_have_the_sizes_of_their_lengths(tmp_path: Path) -> None:
    code, _, said = traced(tmp_path, written(tmp_path, PACKED))
    assert code == 0, said


@pytest.mark.slow
def test_what_is_saved_after_a_short_loop_is_seen(tmp_path: Path) -> None:
    code, answer, said = traced(tmp_path, written(tmp_path, SHARDED_SAVE))
    assert code == 0, said
    assert "save" in answer["phases"]
    assert [Path(change["path"]).parent.name for change in answer["files_not_written"]] == ["sharded"]


@pytest.mark.slow
def test_what_is_saved_after_the_last_asked_step_is_seen(tmp_path: Path) -> None:
    script = SHARDED_SAVE.replace("range(5)", "range(100)").replace(
        "    optimizer.zero_grad()\n", "    torch.save(net.state_dict(), 'step.pt') if step == 1 else None\n"
    )
    code, answer, said = traced(tmp_path, written(tmp_path, script), options=("--steps", "2"))
    assert code == 0, said
    assert answer["windows"] == 2
    assert "save" in answer["phases"]


@pytest.mark.slow
def test_a_cuda_graph_is_refused_by_name_and_line(tmp_path: Path) -> None:
    code, _, said = traced(tmp_path, written(tmp_path, CUDA_GRAPH))
    assert code == 2, said
    assert "train.py:8: a CUDA graph" in said
    assert "memfit.errors" not in said


@pytest.mark.slow
def test_the_kernels_that_deepspeed_compiles_are_stood_in_for_and_named(tmp_path: Path) -> None:
    pytest.importorskip("deepspeed")
    script = (
        "import deepspeed, torch\n"
        "net = torch.nn.Linear(256, 256)\n"
        "config = {'train_micro_batch_size_per_gpu': 4, 'bf16': {'enabled': True},\n"
        "          'optimizer': {'type': 'AdamW', 'params': {'lr': 1e-3}},\n"
        "          'zero_optimization': {'stage': 2, 'reduce_bucket_size': 100000}}\n"
        "engine, *_ = deepspeed.initialize(model=net, config=config)\n"
        "for step in range(4):\n"
        "    engine.backward(engine(torch.ones(4, 256, device=engine.device, dtype=torch.bfloat16)).sum())\n"
        "    engine.step()\n"
    )
    code, answer, said = traced(tmp_path, written(tmp_path, script), options=("--world", "2"))
    assert code == 0, said
    assert answer["phases"]["train"]["categories"]["optimizer"] == pytest.approx(2 * 4 * 256 * 257 / 2, rel=0.02)
    assert any("fused_adam" in line for line in answer["not_seen"])


@pytest.mark.slow
def test_a_script_that_spawns_a_process_for_each_card_sees_the_asked_ranks(tmp_path: Path) -> None:
    script = (
        "import torch, torch.distributed as dist, torch.multiprocessing as mp\n"
        "def main(rank, world):\n"
        "    dist.init_process_group('nccl', rank=rank, world_size=world)\n"
        "    assert dist.get_world_size() == 4\n"
        "    net = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(64, 64).to(rank), device_ids=[rank])\n"
        "    optimizer = torch.optim.SGD(net.parameters(), 0.1)\n"
        "    for step in range(4):\n"
        "        net(torch.ones(2, 64, device=rank)).sum().backward()\n"
        "        optimizer.step()\n"
        "if __name__ == '__main__':\n"
        "    mp.spawn(main, args=(torch.cuda.device_count(),), nprocs=torch.cuda.device_count())\n"
    )
    code, answer, said = traced(tmp_path, written(tmp_path, script), options=("--world", "4"))
    assert code == 0, said
    assert answer["world"] == 4


PAGED = (
    "import torch\n"
    "import bitsandbytes.functional as F\n"
    "net = torch.nn.Linear(1024, 1024, bias=False).cuda()\n"
    "state = F.get_paged(8192, 4096, dtype=torch.uint8, device=net.weight.device)\n"
    "F.fill(state, 0)\n"
    "optimizer = torch.optim.SGD(net.parameters())\n"
    "for step in range(3):\n"
    "    net(torch.ones(8, 1024, device='cuda')).sum().backward()\n"
    "    F.prefetch_tensor(state)\n"
    "    optimizer.step()\n"
    "    optimizer.zero_grad()\n"
    "assert state.is_paged and state.device.type == 'cpu'\n"
)


def test_paged_state_of_a_mock_of_bitsandbytes_is_the_host_s_and_is_noted(tmp_path: Path) -> None:
    """A mock, since bitsandbytes may not be installed: functions of these names that need a library for CUDA."""
    package = tmp_path / "bitsandbytes"
    package.mkdir()
    (package / "__init__.py").write_text("")
    needs_cuda = "(*args, **kwargs):\n    raise RuntimeError('no library for CUDA')\n"
    names = ("get_paged", "prefetch_tensor", "fill")
    (package / "functional.py").write_text("".join(f"def {name}{needs_cuda}" for name in names))
    code, answer, said = traced(tmp_path, written(tmp_path, PAGED))
    assert code == 0, said
    assert any("paged optimizer state is managed memory" in line for line in answer["not_seen"])
    assert answer["phases"]["train"]["allocated_bytes"] < 32 * MIB, "weights, gradients and workspaces, but no state"


@pytest.mark.slow
@pytest.mark.parametrize("name", ["PagedAdamW8bit", "PagedAdamW"])
def test_bitsandbytes_paged_optimizers_leave_the_card_free(tmp_path: Path, name: str) -> None:
    pytest.importorskip("bitsandbytes")
    script = (
        "import torch, bitsandbytes\n"
        "net = torch.nn.Linear(1024, 1024, bias=False).cuda()\n"
        f"optimizer = bitsandbytes.optim.{name}(net.parameters())\n"
        "for step in range(3):\n"
        "    net(torch.ones(8, 1024, device='cuda')).sum().backward()\n"
        "    optimizer.step()\n"
        "    optimizer.zero_grad()\n"
    )
    code, answer, said = traced(tmp_path, written(tmp_path, script))
    assert code == 0, said
    assert any("paged optimizer state is managed memory" in line for line in answer["not_seen"])
    assert answer["phases"]["train"]["categories"]["optimizer"] < MIB


@pytest.mark.slow
def test_a_compiled_step_and_a_compiled_net_take_inductor_s_plan_and_both_are_noted(tmp_path: Path) -> None:
    script = (
        "import torch\n"
        "net = torch.compile(torch.nn.Linear(1024, 1024, bias=False).cuda())\n"
        "optimizer = torch.optim.SGD(net.parameters(), lr=0.0)\n"
        "@torch.compile(fullgraph=True)\n"
        "def step(weight, gradient):\n"
        "    scale = gradient.view(-1, 256).abs().amax(1, keepdim=True)\n"
        "    weight.sub_((gradient.view(-1, 256) / scale).view(weight.shape) * 0.1)\n"
        "for _ in range(3):\n"
        "    net(torch.ones(8, 1024, device='cuda')).sum().backward()\n"
        "    with torch.no_grad():\n"
        "        for weight in net.parameters():\n"
        "            step(weight.detach(), weight.grad)\n"
        "    optimizer.step()\n"
        "    optimizer.zero_grad()\n"
    )
    code, answer, said = traced(tmp_path, written(tmp_path, script))
    assert code == 0, said
    assert sum("inductor plans for it; not validated" in line for line in answer["not_seen"]) == 2
