"""Turns of training scripts that other people write."""

import io
from pathlib import Path
from zipfile import ZipFile

import pytest
import torch

from tests.script.script_trace import trace_here

NET = (
    "import torch, copy\n"
    "from torch.utils.data import DataLoader, IterableDataset, TensorDataset\n"
    "net = torch.nn.Linear(256, 256).cuda()\n"
    "optimizer = torch.optim.SGD(net.parameters(), 0.1)\n"
)
STEP = "loss.backward(); optimizer.step(); optimizer.zero_grad()\n"


def test_an_endless_loader_asked_by_hand_goes_on(tmp_path: Path) -> None:
    outcome = trace_here(
        tmp_path,
        NET + "class Endless(IterableDataset):\n"
        "    def __iter__(self):\n"
        "        while True:\n"
        "            yield torch.ones(256)\n"
        "batches = iter(DataLoader(Endless(), batch_size=4))\n"
        "for step in range(9):\n"
        "    for part in range(3):\n"
        "        loss = net(next(batches).cuda()).sum()\n"
        "        loss.backward()\n"
        "    optimizer.step()\n",
    )
    assert outcome.error is None, outcome.error.text
    assert outcome.windows > 2


def test_a_pass_whose_end_is_expected_ends_early(tmp_path: Path) -> None:
    outcome = trace_here(
        tmp_path,
        NET + "def batches(loader):\n"
        "    iterator = iter(loader)\n"
        "    while True:\n"
        "        try:\n"
        "            yield next(iterator)\n"
        "        except StopIteration:\n"
        "            return\n"
        "loader = DataLoader(TensorDataset(torch.ones(400, 256)), batch_size=4)\n"
        "for (x,) in batches(loader):\n"
        f"    loss = net(x.cuda()).sum(); {STEP}"
        "torch.save(net.state_dict(), 'last.pt')\n",
        batches=3,
    )
    assert outcome.error is None, outcome.error.text
    assert outcome.windows == 3
    assert outcome.footprint is not None
    assert "save" in outcome.footprint.phases


AVERAGE = (
    NET + "average = copy.deepcopy(net).eval()\n"
    "for epoch in range(3):\n"
    "    for (x,) in DataLoader(TensorDataset(torch.ones(16, 256)), batch_size=4):\n"
    "{teacher}"
    f"        loss = net(x.cuda()).sum(); {STEP}"
    "{validation}"
)


def test_validation_of_an_average_of_the_weights_is_validation(tmp_path: Path) -> None:
    validation = "    with torch.no_grad():\n        average(torch.ones(1 << 15, 256).cuda())\n"
    footprint = trace_here(tmp_path, AVERAGE.format(teacher="", validation=validation)).footprint
    assert footprint is not None
    assert footprint.phases["validate"].allocated_bytes >= 2 * 4 * 256 << 15


def test_a_teacher_that_runs_in_each_step_is_part_of_training(tmp_path: Path) -> None:
    teacher = "        with torch.no_grad():\n            target = average(x.cuda())\n"
    footprint = trace_here(tmp_path, AVERAGE.format(teacher=teacher, validation="")).footprint
    assert footprint is not None
    assert list(footprint.phases) == ["train"]


def test_a_wrapped_net_is_moved_to_the_card_where_it_is_and_its_type_changes(tmp_path: Path) -> None:
    outcome = trace_here(
        tmp_path,
        NET + "import torch.distributed as dist\n"
        "dist.init_process_group('nccl')\n"
        "net = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.BatchNorm2d(8), torch.nn.Conv2d(8, 4, 3))\n"
        "net = torch.nn.SyncBatchNorm.convert_sync_batchnorm(net).cuda()\n"
        "net = torch.nn.parallel.DistributedDataParallel(net, device_ids=[0]).to('cuda:0')\n"
        "optimizer = torch.optim.SGD(net.parameters(), 0.1)\n"
        "for step in range(4):\n"
        f"    loss = net(torch.ones(2, 3, 16, 16).cuda()).sum(); {STEP}"
        "net.half()\n"
        "assert {p.dtype for p in optimizer.param_groups[0]['params']} == {torch.float16}\n",
        world=2,
    )
    assert outcome.error is None, outcome.error.text
    assert outcome.windows >= 3


def test_freeing_a_variable_is_an_option_only_where_it_is_not_read_later(tmp_path: Path) -> None:
    outcome = trace_here(
        tmp_path,
        NET + "def step():\n"
        "    dead = net(torch.ones(512, 256).cuda())\n"
        "    read = net(torch.ones(512, 256).cuda())\n"
        "    loss = dead.sum() + read.sum()\n"
        f"    {STEP}"
        "    return read.detach().mean()\n"
        "for number in range(4):\n"
        "    step()\n",
    )
    names = {option.name for option in outcome.options}
    assert "free dead" in names
    assert "free read" not in names


def test_a_checkpoint_that_was_saved_on_a_card_comes_back_there(tmp_path: Path) -> None:
    written = io.BytesIO()
    torch.save({"weight": torch.ones(1024, 1024)}, written)
    with ZipFile(written) as cpu, ZipFile(tmp_path / "net.pt", "w") as card:
        for name in cpu.namelist():
            content = cpu.read(name)
            card.writestr(name, content.replace(b"X\x03\x00\x00\x00cpu", b"X\x06\x00\x00\x00cuda:0"))
    outcome = trace_here(
        tmp_path,
        NET + "assert torch.load('net.pt')['weight'].is_cuda\n"
        "assert not torch.load('net.pt', map_location='cpu')['weight'].is_cuda\n"
        "kept = torch.load('net.pt')\n"
        f"for step in range(3):\n    loss = net(torch.ones(4, 256).cuda()).sum(); {STEP}",
    )
    assert outcome.error is None, outcome.error.text
    assert outcome.footprint is not None
    assert outcome.footprint.phases["train"].allocated_bytes > 4 << 20


def test_memory_stats_have_the_names_of_the_real_ones(tmp_path: Path) -> None:
    outcome = trace_here(
        tmp_path,
        NET + "stats = torch.cuda.memory_stats()\n"
        "nested = torch.cuda.memory_stats_as_nested_dict()\n"
        "assert stats['segment.all.current'] == stats['segment.small_pool.current'] == 1\n"
        "assert stats['active.all.current'] == nested['active']['all']['current'] == 2\n"
        "assert nested['allocated_bytes']['all']['peak'] == torch.cuda.max_memory_allocated()\n"
        "assert torch.accelerator.memory_reserved() == torch.cuda.memory_reserved() > 0\n"
        "assert torch.accelerator.get_memory_info() == torch.cuda.mem_get_info()\n"
        "for step in range(3):\n"
        f"    loss = net(torch.ones(4, 256).cuda()).sum(); {STEP}",
    )
    assert outcome.error is None, outcome.error.text


def test_gradients_that_are_freed_before_a_save_are_no_part_of_it(tmp_path: Path) -> None:
    footprint = trace_here(
        tmp_path,
        NET + "for step in range(3):\n"
        f"    loss = net(torch.ones(4, 256).cuda()).sum(); {STEP}"
        "    torch.save(net.state_dict(), 'last.pt')\n",
    ).footprint
    assert footprint is not None
    assert footprint.phases["save"].categories["gradients"] == 0


def test_a_dataset_that_only_works_in_a_worker_works(tmp_path: Path) -> None:
    outcome = trace_here(
        tmp_path,
        NET + "from torch.utils.data import Dataset, get_worker_info\n"
        "class Clips(Dataset):\n"
        "    def __len__(self):\n"
        "        return 40\n"
        "    def prepare(self, number):\n"
        "        self.folder = f'worker{number}'\n"
        "    def __getitem__(self, index):\n"
        "        assert self.folder == f'worker{get_worker_info().id}'\n"
        "        return torch.ones(256)\n"
        "clips = Clips()\n"
        "loader = DataLoader(clips, batch_size=4, num_workers=2, worker_init_fn=clips.prepare)\n"
        "for x in loader:\n"
        f"    loss = net(x.cuda()).sum(); {STEP}"
        "assert get_worker_info() is None\n",
    )
    assert outcome.error is None, outcome.error.text
    assert outcome.windows >= 3


def test_buckets_of_ddp_are_communication(tmp_path: Path) -> None:
    footprint = trace_here(
        tmp_path,
        NET + "import torch.distributed as dist\n"
        "dist.init_process_group('nccl')\n"
        "wrapped = torch.nn.parallel.DistributedDataParallel(net, device_ids=[0])\n"
        "for step in range(3):\n"
        f"    loss = wrapped(torch.ones(4, 256).cuda()).sum(); {STEP}",
        world=2,
    ).footprint
    assert footprint is not None
    assert footprint.phases["train"].categories["communication"] == 4 * 257 * 256


CONSOLIDATED = """
import torch, torch.distributed as dist
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel
dist.init_process_group("nccl")
torch.cuda.set_device(0)
net = torch.nn.Sequential(*[torch.nn.Linear(512, 512, bias=False) for _ in range(4)]).cuda()
ddp = DistributedDataParallel(net, device_ids=[0])
optimizer = ZeroRedundancyOptimizer(net.parameters(), optimizer_class=torch.optim.AdamW, lr=0.1)
for step in range(4):
    ddp(torch.randn(2, 512).cuda()).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
optimizer.consolidate_state_dict(to=TO)
if TO == 0:
    state = optimizer.state_dict()["state"]
    assert {(key, values["exp_avg"].shape) for key, values in state.items()} == {(i, (512, 512)) for i in range(4)}
    torch.save(state, "state.pt")
"""


@pytest.mark.parametrize("to", [0, 1])
def test_a_sharded_optimizer_collects_the_state_of_other_ranks(tmp_path: Path, to: int) -> None:
    outcome = trace_here(tmp_path, CONSOLIDATED.replace("TO", str(to)), world=2)
    assert outcome.error is None, outcome.error.text
    shard = 2 * (2 * 512 * 512 * 4 + 4)  # two moments and a count of steps, of two of the four layers
    held = [line for line in outcome.lines if line.text.startswith("optimizer.consolidate")]
    assert [line.bytes for line in held] == ([2 * shard] if to == 0 else [])  # as bytes, and as tensors


def test_data_of_parameters_move_to_the_card_and_fully_shard_moves_a_net(tmp_path: Path) -> None:
    outcome = trace_here(
        tmp_path,
        NET + "import torch.distributed as dist\n"
        "from torch.distributed.fsdp import fully_shard\n"
        "dist.init_process_group('nccl')\n"
        "other = torch.nn.Linear(8, 8)\n"
        "other.weight.note = 'mine'\n"
        "for parameter in other.parameters():\n"
        "    parameter.data = parameter.data.cuda()\n"
        "assert other.weight.is_cuda and other.weight.note == 'mine'\n"
        "assert isinstance(other.weight, torch.nn.Parameter) and other.weight.requires_grad\n"
        "net = torch.nn.Linear(256, 256, bias=False)\n"
        "net.register_buffer('scale', torch.ones(256))\n"
        "fully_shard(net)\n"
        "assert net.scale.is_cuda\n"
        "optimizer = torch.optim.AdamW(net.parameters())\n"
        "for step in range(4):\n"
        f"    loss = net(torch.ones(4, 256).cuda()).sum(); {STEP}",
        world=2,
    )
    assert outcome.error is None, outcome.error.text
    assert outcome.footprint is not None
    assert outcome.footprint.phases["train"].categories["optimizer"] >= 2 * 4 * 256 * 256 // 2


def test_an_operator_without_a_kernel_is_named_without_the_list_of_all_kernels(tmp_path: Path) -> None:
    outcome = trace_here(tmp_path, "import torch\ntorch.ones(2, 2).to_sparse().sort()\n")
    assert outcome.error is not None
    assert "Could not run 'aten::sort" in outcome.error.text
    assert 'train.py", line 2' in outcome.error.text
    assert "registered at" not in outcome.error.text


def test_what_a_failed_attempt_held_until_its_error_was_handled_does_not_count(tmp_path: Path) -> None:
    outcome = trace_here(
        tmp_path,
        "import torch\n"
        "net = torch.nn.Sequential(*[torch.nn.Linear(1024, 1024) for _ in range(4)]).cuda()\n"
        "optimizer = torch.optim.SGD(net.parameters(), 0.1)\n"
        "size = 1 << 15\n"
        "for step in range(6):\n"
        "    try:\n"
        "        net(torch.ones(size, 1024).cuda()).sum().backward()\n"
        "    except torch.cuda.OutOfMemoryError:\n"
        "        optimizer.zero_grad()\n"
        "        torch.cuda.empty_cache()\n"
        "        size //= 16\n"
        "        continue\n"
        "    optimizer.step(); optimizer.zero_grad()\n",
        memory_bytes=1 << 30,
        enforced=True,
    )
    assert outcome.error is None, outcome.error.text
    assert outcome.failed_attempts == 1
    assert outcome.footprint is not None
    activations = 5 * 2048 * 1024 * 4
    train = outcome.footprint.phases["train"]
    assert train.categories["gradients"] > 0
    assert activations < train.allocated_bytes < 2 * activations + 64 * 1024 * 1024


def test_real_tensors_are_copied_within_a_step_on_the_virtual_cpu_which_has_no_cards(tmp_path: Path) -> None:
    outcome = trace_here(
        tmp_path,
        "import copy, torch\n"
        "net = torch.nn.Linear(8, 8)\n"
        "optimizer = torch.optim.SGD(net.parameters(), 0.1)\n"
        "assert torch.cuda.device_count() == 0 and not torch.cuda.is_available()\n"
        "for step in range(3):\n"
        "    loss = net(torch.ones(4, 8)).sum()\n"
        "    assert copy.deepcopy(torch.arange(3.0)).tolist() == [0, 1, 2]\n"
        "    loss.backward(); optimizer.step(); optimizer.zero_grad()\n",
        device="cpu",
    )
    assert outcome.error is None, outcome.error.text


def test_nets_called_within_functional_transforms_are_traced(tmp_path: Path) -> None:
    outcome = trace_here(
        tmp_path,
        NET + "from torch.func import functional_call, grad, vmap\n"
        "def error(weights, x):\n"
        "    return functional_call(net, weights, (x,)).square().mean()\n"
        "def after_a_step(weights, x):\n"
        "    gradients = grad(error)(weights, x)\n"
        "    return error({name: value - gradients[name] for name, value in weights.items()}, x)\n"
        "for step in range(3):\n"
        "    weights = dict(net.named_parameters())\n"
        "    loss = vmap(after_a_step, (None, 0))(weights, torch.randn(4, 8, 256, device='cuda')).mean()\n"
        f"    {STEP}",
    )
    assert outcome.error is None, outcome.error.text
    assert outcome.windows == 3


def test_a_last_attempt_that_runs_out_of_memory_leaves_an_answer(tmp_path: Path) -> None:
    outcome = trace_here(
        tmp_path,
        NET + "for step in range(3):\n"
        "    loss = net(torch.ones(4, 256, device='cuda')).sum()\n"
        f"    {STEP}"
        "try:\n"
        "    x = torch.ones(1 << 18, 256, device='cuda')\n"
        "    net(net(net(net(x))))\n"
        "except torch.OutOfMemoryError:\n"
        "    pass\n",
        memory_bytes=1 << 30,
        enforced=True,
    )
    assert outcome.error is None, outcome.error.text
    assert outcome.windows == 3
    assert outcome.failed_attempts == 1


def test_a_dtensor_is_gathered_by_positions_on_the_virtual_cpu(tmp_path: Path) -> None:
    outcome = trace_here(
        tmp_path,
        "import torch, torch.distributed as dist\n"
        "from torch.distributed.device_mesh import init_device_mesh\n"
        "from torch.distributed.tensor import DTensor, Replicate\n"
        "dist.init_process_group('gloo')\n"
        "mesh = init_device_mesh('cpu', (2,))\n"
        "net = torch.nn.Linear(64, 64)\n"
        "optimizer = torch.optim.SGD(net.parameters(), 0.1)\n"
        "for step in range(3):\n"
        "    table = DTensor.from_local(net(torch.ones(8, 64)), mesh, [Replicate()])\n"
        "    rows = DTensor.from_local(torch.arange(8).view(8, 1), mesh, [Replicate()])\n"
        "    loss = table.gather(0, rows).to_local().sum()\n"
        f"    {STEP}",
        device="cpu", world=2,
    )  # fmt: skip
    assert outcome.error is None, outcome.error.text


@pytest.mark.parametrize("device", ["rtx4090", "cpu"])
def test_a_matrix_of_compressed_rows_is_refused_by_its_line(tmp_path: Path, device: str) -> None:
    outcome = trace_here(
        tmp_path,
        "import torch\n"
        "where = 'cuda' if torch.cuda.is_available() else 'cpu'\n"
        "edges = torch.tensor([[0, 1], [1, 0]]).to(where)\n"
        "matrix = torch.sparse_csr_tensor(edges[0], edges[1], torch.ones(1, device=where), (1, 2))\n",
        device=device,
    )
    assert outcome.error is not None
    assert "train.py:4: no rule says what it allocates" in outcome.error.summary


def test_an_optimizer_whose_weights_another_steps_is_none_that_never_stepped(tmp_path: Path) -> None:
    outcome = trace_here(
        tmp_path,
        "import torch\n"
        "class Sharpness(torch.optim.Optimizer):\n"
        "    def __init__(self, weights):\n"
        "        super().__init__(weights, {})\n"
        "        self.base = torch.optim.SGD(self.param_groups, lr=0.1)\n"
        "    def second_step(self):\n"
        "        self.base.step(); self.zero_grad()\n"
        "net, other = torch.nn.Linear(8, 8).cuda(), torch.nn.Linear(8, 8).cuda()\n"
        "optimizer = Sharpness(net.parameters())\n"
        "unused = torch.optim.SGD(other.parameters(), lr=0.1)\n"
        "for step in range(3):\n"
        "    net(torch.ones(8, 8).cuda()).sum().backward(); optimizer.second_step()\n",
    )
    assert outcome.error is None, outcome.error.text
    never = [line for line in outcome.not_seen if "never stepped" in line]
    assert [line.rpartition(":")[2] for line in never] == ["10 never stepped"]
