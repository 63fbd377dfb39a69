"""python -m pytest tests/jobs/test_optimizers.py"""

import pytest
import torch
from torch import nn

from memfit.jobs.optimizers.adam8bit import AdamW8bit, codes, dequantize, quantize
from memfit.jobs.optimizers.scaled_adam import ScaledAdam


def test_codes_are_256_values():
    for signed, smallest in ((True, -1.0), (False, 0.0)):
        table = codes(signed)
        assert len(table) == 256
        assert len(set(table.tolist())) == 256
        assert table[0] == pytest.approx(smallest, abs=0.01)
        assert table[-1] == 1.0
        assert 0.0 in table.tolist()


def test_encoding_keeps_the_order_of_magnitude():
    torch.manual_seed(0)
    values = torch.randn(3, 1000) * 10.0 ** torch.randint(-5, 1, (3, 1000))
    again = dequantize(quantize(values, codes(True)), codes(True), values.shape)
    blocks = nn.functional.pad(values.flatten(), (0, -3000 % 256)).view(-1, 256)
    largest = blocks.abs().amax(dim=1).repeat_interleave(256)[:3000].view(3, 1000)
    # Beside the block's largest value, the widest gap between two codes of a decade of 1, 2, 4, … values.
    assert ((again - values).abs() <= 0.45 * values.abs() + 1e-6 * largest).all()
    assert (again - values).norm() < 0.02 * values.norm()


def test_adamw8bit_state_and_steps():
    """Its weights follow AdamW's, and its state is 2 bytes a value and 8 a block of 256."""
    torch.manual_seed(0)
    data, target = torch.randn(64, 100), torch.randn(64, 50)
    start = nn.Linear(100, 50).state_dict()
    finals = {}
    for kind in (AdamW8bit, torch.optim.AdamW):
        net = nn.Linear(100, 50)
        net.load_state_dict(start)
        optimizer = kind(net.parameters(), lr=1e-2)
        for _ in range(30):
            optimizer.zero_grad()
            nn.functional.mse_loss(net(data), target).backward()
            optimizer.step()
        finals[kind] = (net, optimizer)
    (eight, optimizer), (full, _) = finals[AdamW8bit], finals[torch.optim.AdamW]
    moved = (full.weight - start["weight"]).norm()
    assert (eight.weight - full.weight).norm() < 0.1 * moved
    stored = [t for pair in (optimizer.state[eight.weight][n] for n in ("exp_avg", "exp_avg_sq")) for t in pair]
    assert sum(t.numel() * t.element_size() for t in stored) == 2 * 5000 + 2 * 4 * 20
    assert optimizer.state[eight.bias]["exp_avg"].dtype == torch.float32


def reference_step(values, gradient, state, lr, beta1, beta2, eps=1e-8):
    """ScaledAdam for one tensor, written from the paper's formulas, in float64, before any update of the size."""
    state["delta"] = beta1 * state.get("delta", 0)
    state["v"] = beta2 * state.get("v", 0) + (1 - beta2) * gradient**2
    state["t"] = state.get("t", 0) + 1
    correction = 1 - beta2 ** state["t"]
    second = state["v"] / correction if correction < 0.99 else state["v"]
    rms = state.setdefault("rms", values.square().mean().sqrt())
    state["delta"] = state["delta"] - lr * (1 - beta1) * rms * gradient / (second.sqrt() + eps)
    return values + state["delta"]


def test_scaled_adam_follows_its_formulas():
    torch.manual_seed(0)
    parameters = [nn.Parameter(torch.randn(4, 5, dtype=torch.float64) * size) for size in (0.1, 1.0, 2.0)]
    expected, states = [p.detach().clone() for p in parameters], [{} for _ in parameters]
    optimizer = ScaledAdam(parameters, 0.03, (0.9, 0.95))
    for _ in range(3):
        for k, parameter in enumerate(parameters):
            parameter.grad = torch.randn_like(parameter)
            expected[k] = reference_step(expected[k], parameter.grad, states[k], 0.03, 0.9, 0.95)
        optimizer.step()
    for parameter, value in zip(parameters, expected, strict=True):
        torch.testing.assert_close(parameter.detach(), value)


def test_scaled_adam_stacks_its_state():
    """Two tensors of one shape share a stacked state, kept by the first."""
    parameters = [nn.Parameter(torch.randn(4, 5)), nn.Parameter(torch.randn(4, 5)), nn.Parameter(torch.ones(1))]
    optimizer = ScaledAdam(parameters, 0.03)
    for parameter in parameters:
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    assert optimizer.state[parameters[0]]["delta"].shape == (2, 4, 5)
    assert optimizer.state[parameters[0]]["scale_grads"].shape == (4, 2, 1, 1)
    assert parameters[1] not in optimizer.state
    first = {"model_norms", "threshold"}
    assert set(optimizer.state[parameters[2]]) == {"step", "delta", "exp_avg_sq"} | first


def test_scaled_adam_clips_at_twice_the_median():
    torch.manual_seed(0)
    parameter = nn.Parameter(torch.ones(10))
    optimizer = ScaledAdam([parameter], 1e-6, clipping_period=4)
    for step in range(6):
        parameter.grad = torch.full((10,), 1000.0 if step == 5 else 1.0)
        before = optimizer.state[parameter]["exp_avg_sq"].clone() if step else torch.zeros(10)
        optimizer.step()
    used = ((optimizer.state[parameter]["exp_avg_sq"][0] - 0.98 * before[0, 0]) / 0.02).sqrt()
    assert used[0].item() == pytest.approx(2.0, rel=1e-3)
