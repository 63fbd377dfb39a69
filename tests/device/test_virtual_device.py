import contextlib
import copy
import gc
import importlib
import os
import sys

import pytest
import torch
import torch.cuda.memory
import torch.cuda.nvtx
import torch.cuda.random
import torch.utils.checkpoint
from torch.amp.autocast_mode import autocast
from torch.amp.grad_scaler import GradScaler

from memfit.device.virtual.card_rules import CardRules
from memfit.device.virtual.patching import appended
from memfit.device.virtual.virtual_device import virtual_cpu, virtual_gpu
from memfit.installation import release_number

CARD = CardRules()
OWNERS = [
    torch, torch._C, torch.cuda, torch.cuda.memory, torch.cuda.random, torch.cuda.nvtx, torch.utils,
    torch._meta_registrations,
    torch.UntypedStorage, torch.Tensor, torch.nn.Module, autocast, GradScaler, torch.optim.Optimizer,
    torch.utils._foreach_utils, sys.modules["torch.optim.optimizer"], torch.amp, torch.random, torch.overrides,
]  # fmt: skip


def snapshot():
    """Every attribute of the modules and classes that are touched, and the content of lists."""
    return [
        {name: (id(value), list(value) if type(value) is list else None) for name, value in vars(owner).items()}
        for owner in OWNERS
    ]


def kernels():
    keys = ("AutocastPrivateUse1", "AutogradPrivateUse1", "PrivateUse1")
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    names = ("aten::linear", "aten::silu_backward", "aten::scaled_dot_product_attention", "aten::softmax.int")
    return [has(name, key) for name in names for key in keys]


@pytest.mark.parametrize("enter", [lambda: virtual_gpu(CARD), virtual_cpu], ids=["gpu", "cpu"])
@pytest.mark.parametrize("fails", [False, True])
def test_leaving_puts_everything_back(enter, fails):
    with virtual_gpu(CARD):
        torch.zeros(2, device="cuda")
    before, before_kernels = snapshot(), kernels()
    modes = torch.utils._python_dispatch._get_current_dispatch_mode_stack()
    functions = torch.overrides._get_current_function_mode_stack()
    try:
        with enter() as device:
            torch.set_default_device(device.device)
            torch.zeros(2).cpu()
            if fails:
                raise KeyError
    except KeyError:
        pass
    assert snapshot() == before
    assert kernels() == before_kernels
    assert torch.utils._python_dispatch._get_current_dispatch_mode_stack() == modes
    assert torch.overrides._get_current_function_mode_stack() == functions
    assert type(torch.zeros(2)) is torch.Tensor
    assert torch.zeros(2).device.type == "cpu"
    assert not torch.cuda.is_available()


def test_large_nets_cost_no_memory():
    """A net of 4 GiB of parameters, moved and trained for a step."""
    with virtual_gpu(CARD) as gpu:
        net = torch.nn.Sequential(*(torch.nn.Linear(16384, 16384, bias=False) for _ in range(4))).to(gpu.device)
        optimizer = torch.optim.AdamW(net.parameters())
        net(torch.randn(8, 16384, device=gpu.device)).sum().backward()
        optimizer.step()
        assert sum(p.numel() * 4 for p in net.parameters()) == 4 * 2**30
    gc.collect()


@pytest.mark.parametrize("device", [virtual_cpu, lambda: virtual_gpu(CARD)], ids=["cpu", "gpu"])
def test_a_copy_of_a_net_has_its_values_alone(device):
    """As of real parameters: a copy kept for its weights had been counted with the gradients of the net."""
    with device() as virtual, virtual.device:
        net = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4))
        net[1].weight = net[0].weight
        net[1].bias.requires_grad_(False)
        net[0].bias.note = "not copied"
        net(torch.randn(2, 4)).sum().backward()
        copied, of_tensor = copy.deepcopy(net), copy.deepcopy(net[0].bias.detach().requires_grad_())
    assert [parameter.requires_grad for parameter in copied.parameters()] == [True, True, False, True, True]
    assert all(isinstance(parameter, torch.nn.Parameter) for parameter in copied.parameters())
    assert all(parameter.grad is None for parameter in copied.parameters())
    assert net[0].weight.grad is not None
    assert copied[1].weight is copied[0].weight is not net[0].weight
    assert not hasattr(copied[0].bias, "note")
    assert of_tensor.requires_grad


def test_only_our_own_item_leaves_a_list():
    items = ["a"]
    with appended(items, "ours"):
        items.append("theirs")
    assert items == ["a", "theirs"]


def test_real_training_afterwards_is_as_before():
    """Pinning asks the process's accelerator, which registering the backend has made ours."""
    with virtual_gpu(CARD):
        assert torch.accelerator.is_available()
    assert not torch.accelerator.is_available()
    data = torch.utils.data.TensorDataset(torch.ones(8, 2))
    warns = pytest.warns(UserWarning, match="pin_memory")  # torch 2.6 leaves it out
    with warns if release_number(torch.__version__) >= (2, 7) else contextlib.nullcontext():
        batches = list(torch.utils.data.DataLoader(data, batch_size=4, pin_memory=True))
    assert [batch[0].shape for batch in batches] == [(4, 2), (4, 2)]
    x = torch.ones(3, 3, requires_grad=True)
    with torch.random.fork_rng():
        torch.utils.checkpoint.checkpoint(lambda t: (t @ t).sin(), x, use_reentrant=False).sum().backward()
    assert x.grad.isfinite().all()


class Raising:
    """A hook of each place that autograd calls in its own thread."""

    def saved(self, x):
        with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, self):
            return x * x

    def of_a_tensor(self, x):
        y = x.exp()
        y.register_hook(self)
        return y

    def of_a_gradient(self, x):
        x.register_post_accumulate_grad_hook(self)
        return x.exp()

    def __call__(self, tensor):
        raise LookupError("in the hook")


@pytest.mark.parametrize("place", ["saved", "of_a_tensor", "of_a_gradient"])
def test_what_a_hook_raises_in_a_backward_comes_out_of_it(gpu, place):
    """Trap: torch asks a device written in Python for its type while the exception is on its way, and would abort."""
    x = torch.ones(4, device="cuda", requires_grad=True)
    loss = getattr(Raising(), place)(x).sum()
    with pytest.raises(LookupError, match="in the hook"):
        loss.backward()
    again = torch.ones(4, device="cuda", requires_grad=True)
    again.exp().sum().backward()
    assert again.grad.shape == (4,)


@pytest.mark.parametrize("enter", [virtual_cpu, lambda: virtual_gpu(CARD)], ids=["cpu", "gpu"])
def test_views_of_ordinary_tensors_in_inference_mode(enter):
    """A view of a tensor from outside is ordinary, as in a real run; what is made inside is not."""
    with enter() as virtual:
        x = torch.zeros(4, 5, device=virtual.device)
        with torch.inference_mode():
            views = [
                x[:, 1],
                x[:, 1:3],
                x.t(),
                x.view(2, 10),
                x[0],
                x.detach(),
                *x.unbind(),
                *x.chunk(2),
                x.expand(4, 5),
            ]
            made = [x + 1, (x + 1)[0], torch.ones(3, device=virtual.device)[1]]
        assert not any(view.is_inference() for view in views)
        assert all(tensor.is_inference() for tensor in made)
        assert all(view.untyped_storage()._cdata == x.untyped_storage()._cdata for view in views)


@pytest.mark.parametrize("virtual", [virtual_cpu, lambda: virtual_gpu(CardRules())], ids=["cpu", "gpu"])
def test_what_a_job_chooses_for_all_of_torch_ends_with_its_trace(virtual):
    """The next job of ``memfit compare``, or the next setting, begins as in a process of its own."""
    with virtual():
        torch.set_default_dtype(torch.float64)
        torch.backends.cuda.enable_flash_sdp(False)
        torch.backends.cuda.enable_cudnn_sdp(False)
        torch.use_deterministic_algorithms(True, warn_only=True)
        assert torch.zeros(1).dtype is torch.float64
    assert torch.zeros(1).dtype is torch.float32
    assert torch.backends.cuda.flash_sdp_enabled()
    assert torch.backends.cuda.cudnn_sdp_enabled()
    assert not torch.are_deterministic_algorithms_enabled()
    assert not torch.is_deterministic_algorithms_warn_only_enabled()


def test_variables_that_a_job_sets_end_with_its_trace(monkeypatch, tmp_path):
    """Those that a module sets at its import stay: no later trace imports it again."""
    monkeypatch.setenv("CHANGED", "before")
    monkeypatch.setenv("GONE", "before")
    monkeypatch.setenv("IMPORTED", "before")
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "sets_a_variable.py").write_text("import os\nos.environ['IMPORTED'] = 'inside'\n")
    monkeypatch.delitem(sys.modules, "sets_a_variable", raising=False)
    with virtual_gpu(CardRules()):
        importlib.import_module("sets_a_variable")
        os.environ.update(CHANGED="inside", ADDED="inside")
        del os.environ["GONE"]
        assert os.environ["CHANGED"] == os.environ["ADDED"] == "inside"
    names = ("CHANGED", "ADDED", "GONE", "IMPORTED")
    assert [os.environ.get(name) for name in names] == ["before", None, "before", "inside"]
