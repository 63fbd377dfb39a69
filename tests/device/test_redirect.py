"""Code written for cuda, run unchanged."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import handle_torch_function, has_torch_function
from torch.utils.checkpoint import checkpoint

from memfit.device.virtual.assumptions import MEMORY_DOUBT, unknown_integers
from memfit.device.virtual.backend import NAME
from memfit.device.virtual.card_rules import CardRules
from memfit.device.virtual.fake_group import fake_world
from memfit.device.virtual.virtual_device import virtual_cpu, virtual_gpu
from memfit.errors import InputError


@pytest.mark.filterwarnings("ignore:.*torch.cuda.amp:FutureWarning")
def test_a_training_script(gpu, tmp_path):
    """As a person writes it: nothing here knows of the virtual GPU."""
    assert torch.cuda.is_available()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.cuda.set_device(0)
    torch.cuda.manual_seed_all(0)
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cuda.matmul.allow_tf32
    net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 30 * 30, 10))
    net = net.to(device, memory_format=torch.channels_last)
    net.cuda()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3, fused=True)
    scaler = torch.amp.GradScaler("cuda")
    old_scaler = torch.cuda.amp.GradScaler()
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-3, total_steps=10)
    generator = torch.Generator("cuda").manual_seed(1)
    assert isinstance(generator, torch.Generator)
    lines = []
    for _ in range(2):
        x = torch.randn(4, 3, 32, 32, device="cuda", generator=generator).to(memory_format=torch.channels_last)
        y = torch.randint(10, (4,)).pin_memory().cuda(non_blocking=True)
        with torch.autocast("cuda"):
            assert torch.is_autocast_enabled()
            assert torch.is_autocast_enabled("cuda")
            out = net(x)
            loss = nn.functional.cross_entropy(out, y)
        assert (out.dtype, loss.dtype) == (torch.float16, torch.float32)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        schedule.step()
        optimizer.zero_grad()
        lines.append(f"{loss.item():.3f} {loss:.2f} {torch.cuda.memory_allocated() / 2**20:.1f}")
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
    torch.save(net.state_dict(), tmp_path / "net.pt")
    assert not (tmp_path / "net.pt").exists()
    assert lines == ["0.500 0.50 0.0"] * 2
    assert old_scaler.is_enabled()
    assert x.is_cuda
    assert next(net.parameters()).is_cuda
    assert not torch.zeros(1).is_cuda
    assert all(p.device.type == "cuda" for p in net.parameters())


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.zeros(3, device="cuda"),
        lambda: torch.zeros(3, device="cuda:1"),
        lambda: torch.zeros(3, device=torch.device("cuda", 0)),
        lambda: torch.tensor([1, 2], device="cuda"),
        lambda: torch.as_tensor([1, 2], device="cuda"),
        lambda: torch.arange(3, device="cuda"),
        lambda: torch.zeros(3).to("cuda"),
        lambda: torch.zeros(3).to("cuda", torch.float16),
        lambda: torch.zeros(3).to(device="cuda", non_blocking=True),
        lambda: torch.zeros(3).cuda(),
        lambda: torch.zeros(3).cuda(0, non_blocking=True),
        lambda: torch.zeros(3).new_zeros(3, device="cuda"),
        lambda: torch.empty_like(torch.zeros(3), device="cuda"),
        lambda: torch.cuda.FloatTensor(2, 3),
        lambda: torch.cuda.LongTensor([1, 2]),
        lambda: nn.Linear(3, 3, device="cuda").weight,
        lambda: nn.Linear(3, 3).cuda().weight,
        lambda: nn.Linear(3, 3).to("cuda").bias,
    ],
)
def test_makes_tensors_on_the_virtual_gpu(gpu, make):
    assert make().device == torch.device("cuda:0")


def test_a_legacy_constructor_takes_a_size(gpu):
    assert torch.cuda.FloatTensor(torch.ones(2, 3).size()).shape == torch.Tensor(torch.Size([2, 3])).shape == (2, 3)
    assert torch.cuda.LongTensor([2, 3]).shape == (2,)


@pytest.mark.filterwarnings("ignore:.*set_default_tensor_type:UserWarning")
def test_tensors_of_the_default_type_are_made_on_the_card(gpu):
    """As scripts that render rays or find boxes begin; ``torch.FloatTensor`` stays a type of the host."""
    torch.set_default_tensor_type("torch.cuda.FloatTensor")
    try:
        made = (torch.zeros(3), torch.Tensor([1e10]), torch.Tensor(2, 3), torch.Tensor(torch.zeros(2, 3).size()))
        assert all(tensor.is_cuda for tensor in made)
        assert [tuple(tensor.shape) for tensor in made] == [(3,), (1,), (2, 3), (2, 3)]
        assert nn.Parameter(torch.Tensor(3, 4)).is_cuda
        assert not torch.FloatTensor([1.0]).is_cuda
    finally:
        torch.set_default_tensor_type(torch.FloatTensor)
    assert not torch.zeros(3).is_cuda
    assert not torch.Tensor([1.0]).is_cuda
    assert "__new__" not in vars(torch.Tensor)


def test_default_devices(gpu):
    with torch.device("cuda"):
        assert torch.zeros(3).is_cuda
    torch.set_default_device("cuda")
    assert torch.zeros(3).is_cuda
    torch.set_default_device("cpu")
    assert not torch.zeros(3).is_cuda
    assert torch.device("cuda").type == "cuda"


@pytest.mark.parametrize(
    ("context", "dtype"),
    [
        (lambda: torch.autocast("cuda"), torch.float16),
        (lambda: torch.autocast(device_type="cuda", dtype=torch.bfloat16), torch.bfloat16),
        (lambda: torch.amp.autocast("cuda", torch.bfloat16), torch.bfloat16),
        (lambda: torch.cuda.amp.autocast(), torch.float16),
        (lambda: torch.cuda.amp.autocast(dtype=torch.bfloat16), torch.bfloat16),
        (lambda: torch.autocast("cuda", enabled=False), torch.float32),
    ],
)
@pytest.mark.filterwarnings("ignore:.*torch.cuda.amp:FutureWarning")
def test_autocast_of_cuda(gpu, context, dtype):
    x = torch.ones(4, 4, device="cuda")
    with context():
        assert (x @ x).dtype is dtype
        assert torch.is_autocast_enabled() is (dtype is not torch.float32)
        if dtype is not torch.float32:
            assert torch.get_autocast_dtype("cuda") is torch.get_autocast_gpu_dtype() is dtype


@pytest.mark.filterwarnings("ignore:.*torch.cuda.amp:FutureWarning")
def test_autocast_decorates(gpu):
    @torch.autocast("cuda", dtype=torch.bfloat16)
    def product(x):
        return x @ x

    assert product(torch.ones(2, 2, device="cuda")).dtype is torch.bfloat16


def test_the_card_is_asked():
    card = CardRules(compute_capability=(7, 5), name="Tesla T4", memory_bytes=15 * 2**30, multiprocessors=40)
    with virtual_gpu(card):
        assert torch.cuda.get_device_name(0) == torch.cuda.get_device_properties("cuda").name == "Tesla T4"
        assert torch.cuda.get_device_capability() == (7, 5)
        assert torch.cuda.mem_get_info() == (15 * 2**30, 15 * 2**30)
        assert torch.cuda.device_count() == 1
        assert not torch.cuda.is_bf16_supported(including_emulation=False)
        with torch.cuda.stream(torch.cuda.Stream()), torch.cuda.device(0):
            assert torch.cuda.current_device() == 0
        assert torch.cuda.Event(enable_timing=True).query()
    assert not torch.cuda.is_available()


@pytest.mark.parametrize(
    "ask",
    [
        "memory_allocated", "max_memory_reserved", "mem_get_info", "memory_stats", "memory_cached",
        "memory_snapshot", "accelerator.memory_allocated", "accelerator.get_memory_info", "accelerator.memory_stats",
    ],
)  # fmt: skip
@pytest.mark.filterwarnings("ignore:.*has been renamed:FutureWarning")
def test_what_lies_on_the_card_is_answered_as_on_an_empty_one_which_is_said(gpu, ask):
    module, name = (torch.accelerator, ask[12:]) if ask.startswith("accelerator.") else (torch.cuda, ask)
    torch.ones(1000, device="cuda")
    assert gpu.assumptions.of_sizes() == ()
    answer = getattr(module, name)()
    (line,) = gpu.assumptions.of_sizes()
    assert line.startswith(f"{__file__}:")
    assert line.endswith(f"() was answered as on an empty card; {MEMORY_DOUBT}")
    assert not answer or answer[0] == answer[1]
    with unknown_integers(1):
        full = getattr(module, name)()
    assert ask == "memory_snapshot" or "stats" in ask or full != answer


@pytest.mark.parametrize(
    ("capability", "threads", "shared"),
    [((7, 5), 1024, 64), ((8, 0), 2048, 164), ((8, 9), 1536, 100), ((9, 0), 2048, 228), ((12, 0), 1536, 100)],
)
def test_what_is_known_of_a_card_is_answered_and_the_rest_is_missing(capability, threads, shared):
    with virtual_gpu(CardRules(compute_capability=capability)):
        properties = torch.cuda.get_device_properties(0)
    assert properties.max_threads_per_multi_processor == threads
    assert properties.shared_memory_per_multiprocessor == shared * 1024
    assert (properties.is_integrated, properties.is_multi_gpu_board) == (0, 0)
    assert getattr(properties, "L2_cache_size", None) is None
    with pytest.raises(InputError, match=r"get_device_properties\(\).L2_cache_size: not known without the card"):
        print(properties.L2_cache_size)


def test_empty_cache_is_told(gpu):
    calls = []
    gpu.on_empty_cache.append(lambda: calls.append(1))
    torch.cuda.empty_cache()
    torch.cuda.memory.empty_cache()
    torch.accelerator.empty_cache()
    assert calls == [1, 1, 1]


def test_numpy_has_the_shape(gpu):
    assert torch.ones(2, 3, device="cuda").cpu().numpy().shape == (2, 3)


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointing(gpu, reentrant):
    net = nn.Linear(8, 8).cuda()
    x = torch.ones(2, 8, device="cuda", requires_grad=True)
    with torch.autocast("cuda", dtype=torch.bfloat16):
        y = checkpoint(net, x, use_reentrant=reentrant)
    assert y.dtype is torch.bfloat16
    y.float().sum().backward()
    assert net.weight.grad.shape == (8, 8)


@pytest.mark.parametrize("way", ["backward", "grad"])
def test_a_recomputed_forward_makes_its_tensors_on_the_card(gpu, way):
    def masked(x):
        return x * torch.arange(len(x), device=x.device)

    weight = torch.ones(4, device="cuda", requires_grad=True)
    loss = checkpoint(masked, weight * 2, use_reentrant=False).sum()
    result = torch.autograd.grad(loss, weight)[0] if way == "grad" else (loss.backward(), weight.grad)[1]
    assert result.is_cuda


def test_code_outside_of_torch_sees_cuda(gpu):
    x = torch.ones(2, device="cuda:0")
    assert x.device == torch.device("cuda:0") == nn.Linear(2, 2).cuda().weight.device
    assert (x.device.type, str(x.device), x.type()) == ("cuda", "cuda:0", "torch.cuda.FloatTensor")
    assert torch.zeros(2, device=x.device).is_cuda
    assert torch.zeros(2).to(x.device).is_cuda
    assert torch.zeros(2).type("torch.cuda.HalfTensor").dtype is torch.float16
    assert torch.zeros(2).device.type == "cpu"
    with torch.autocast(x.device.type, dtype=torch.bfloat16):
        assert nn.Linear(2, 2).to(x.device)(x).dtype is torch.bfloat16


def test_devices_are_as_before_afterwards():
    with virtual_gpu(CardRules()):
        x = torch.ones(2, device="cuda")
    assert x.device.type == NAME


@pytest.mark.filterwarnings("ignore:.*weight_norm:FutureWarning")
def test_weight_norm_moves_though_its_weight_is_on_a_graph(gpu):
    net = nn.utils.weight_norm(nn.Conv1d(4, 4, 3)).cuda()
    net(torch.ones(2, 4, 8, device="cuda")).sum().backward()
    assert net.weight_g.grad.shape == net.weight_g.shape
    assert net.weight_v.device.type == "cuda"
    nn.utils.remove_weight_norm(net)


def test_data_parallel_on_one_card_is_its_module(gpu):
    net = nn.DataParallel(nn.Linear(3, 2)).cuda()
    out = net(torch.ones(4, 3))
    assert (out.shape, out.is_cuda) == ((4, 2), True)


@torch.compile(fullgraph=True)
def twice(x):
    assert not torch.compiler.is_compiling()
    return 2 * x


def test_what_is_compiled_runs_as_written_under_the_names_of_a_real_run(gpu):
    net = torch.compile(nn.Sequential(nn.Linear(3, 2)), mode="max-autotune").cuda()
    assert twice(net(torch.ones(2, 3, device="cuda"))).is_cuda
    assert [name for name, _ in net.named_parameters()] == ["_orig_mod.0.weight", "_orig_mod.0.bias"]


def test_what_is_compiled_runs_as_written_when_a_process_group_was_made_on_the_way(gpu):
    with fake_world(2):
        assert torch.compile(nn.Linear(3, 2)).cuda()(torch.ones(2, 3, device="cuda")).shape == (2, 2)


def test_what_is_compiled_runs_as_written_after_a_process_group():
    with fake_world(2):
        pass
    with virtual_gpu(CardRules(compute_capability=(8, 0))):
        assert torch.compile(nn.Linear(3, 2)).cuda()(torch.ones(2, 3, device="cuda")).shape == (2, 2)


def test_what_is_compiled_runs_as_written_on_the_virtual_cpu():
    with virtual_cpu():
        assert twice(torch.compile(nn.Linear(3, 2))(torch.ones(2, 3))).shape == (2, 2)


def test_streams_and_statistics_are_answered(gpu):
    stream = torch.cuda.Stream()
    x = torch.ones(2, device="cuda")
    x.record_stream(stream)
    torch.cuda.memory._record_memory_history()
    assert torch.cuda.memory_stats()["allocated_bytes.all.peak"] == 0


@pytest.mark.parametrize("where", ["cpu", "cuda"])
def test_ctc_loss_takes_the_widest_target(gpu, where):
    log_probs = torch.randn(50, 4, 20, device="cuda", requires_grad=True)
    targets = torch.zeros(4, 10, dtype=torch.long, device="cuda")
    lengths = [torch.full((4,), length, device=where) for length in (50, 10)]
    nn.functional.ctc_loss(log_probs.log_softmax(2), targets, *lengths).backward()
    assert log_probs.grad.shape == (50, 4, 20)
    assert "targets of 10" in [assumption.answer for assumption in gpu.assumptions]


def test_unique_gives_as_many_as_there_can_be(gpu):
    values, inverse, counts = torch.unique(torch.zeros(3, 4, device="cuda"), return_inverse=True, return_counts=True)
    assert (values.shape, inverse.shape, counts.shape) == ((12,), (3, 4), (12,))
    assert torch.unique(torch.zeros(5, device="cuda")).shape == (5,)


def test_a_replaced_function_of_torch_keeps_arguments_of_its_own(gpu, monkeypatch):
    """GPT-SoVITS' attention with a cache: under any mode, it hands torch's own function to handle_torch_function."""
    original = F.multi_head_attention_forward

    def with_cache(query, *args, cache=None, **kwargs):
        if has_torch_function((query,)):
            return handle_torch_function(original, (query,), query, *args, cache=cache, **kwargs)
        cache["calls"] += 1
        return original(query, *args, **kwargs)

    monkeypatch.setattr(F, "multi_head_attention_forward", with_cache)
    attention, cache = nn.MultiheadAttention(8, 2, device="cuda"), {"calls": 0}
    x = torch.randn(3, 1, 8, device="cuda")
    out, _ = F.multi_head_attention_forward(
        x, x, x, 8, 2, attention.in_proj_weight, attention.in_proj_bias, None, None, False, 0.0,
        attention.out_proj.weight, attention.out_proj.bias, cache=cache,
    )  # fmt: skip
    assert out.shape == (3, 1, 8)
    assert cache == {"calls": 1}


def test_packages_whose_names_begin_with_torch_see_cuda(gpu):
    """torchvision's files lie beside torch's, in a folder whose path begins as torch's does."""
    x, inside = torch.ones(2, device="cuda"), Path(torch.__file__).parent
    for folder, kind in ((f"{inside}vision", "cuda"), (str(inside), NAME), (str(inside.parent / "timm"), "cuda")):
        seen = eval(compile("x.device.type", f"{folder}/ops.py", "eval"), {"x": x})
        assert seen == kind


OLD = """
import sys, torch
for name in vars(torch.accelerator.memory):
    if not name.startswith("__") and hasattr(torch.accelerator, name):
        delattr(torch.accelerator, name)
del torch.accelerator.memory
sys.modules["torch.accelerator.memory"] = None
from memfit.device.virtual.cuda_module import ACCELERATOR, accelerator_memory
assert ACCELERATOR == (torch.accelerator,)
assert accelerator_memory({"memory_allocated": int}) == {}
"""


def test_an_accelerator_without_functions_of_memory_as_before_torch_2_9_simulated():
    subprocess.run([sys.executable, "-c", OLD], check=True, timeout=120)
