"""python -m pytest tests/jobs/test_f5_tts.py"""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from memfit.job import Shape
from memfit.jobs.f5_tts import E2Base, E2Small, F5Base, F5Small, F5Tiny
from tests.jobs.kept import kept

COUNTS = [
    (F5Base, {}, 337_096_804, 363),
    (F5Small, {}, 159_228_772, 307),
    (F5Small, {"vocabulary": 256}, 158_056_804, 307),
    (E2Base, {}, 333_470_444, 362),
    (E2Small, {}, 157_161_708, 304),
]


@pytest.mark.parametrize(("kind", "settings", "parameters", "tensors"), COUNTS)
def test_counts(kind, settings, parameters, tensors):
    job = kind(**settings)
    with torch.device("meta"):
        (net,) = job.nets().values()
    assert sum(p.numel() for p in net.parameters() if p.requires_grad) == parameters
    assert len(list(net.parameters())) == tensors


@pytest.mark.parametrize("kind", [F5Base, F5Small, E2Base, E2Small])
def test_a_step_takes_no_decision_on_values(kind):
    """A step under FakeTensorMode stops at the first Python decision that needs a tensor's value."""
    job = kind()
    with FakeTensorMode():
        nets = job.nets()
        loss, units = job.loss(nets, job.batch(Shape(items=2, length=200)))
        (loss / units).backward()
        assert all(p.grad is not None for net in nets.values() for p in net.parameters())
        paths = {f"{name}.{path}" for name, net in nets.items() for path, _ in net.named_modules()}
        assert set(job.checkpointable(nets)) <= paths


def test_the_loss_falls_on_speech():
    torch.manual_seed(0)
    job = F5Tiny(clips=8)
    nets = job.nets()
    optimizer = job.optimizers(nets)["adamw"]
    batch = job.collate(job.dataset())
    losses = []
    for _ in range(6):
        total, units = job.loss(nets, batch)
        (total / units).backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append((total / units).item())
    assert losses[-1] < 0.8 * losses[0]


def test_a_split_window_learns_the_same():
    torch.manual_seed(0)
    job = F5Tiny(clips=8, dim=32, depth=2)
    net = job.nets()["dit"].double()
    for parameter in net.parameters():
        torch.nn.init.normal_(parameter, std=0.05)
    samples = job.dataset()

    def gradients(*parts):
        units = 0
        for part in parts:
            batch = {k: v.double() if v.is_floating_point() else v for k, v in job.collate(part).items()}
            total, valid = job.loss({"dit": net}, batch)
            total.backward()
            units += int(valid)
        flat = torch.cat([p.grad.flatten() for p in net.parameters()]) / units
        net.zero_grad()
        return flat

    complete = gradients(samples)
    ragged = gradients(samples[:3], samples[3:6], samples[6:])
    # Times and positions are fp32 inside the double net, the same ones in both.
    assert (complete - ragged).norm() < 1e-9 * complete.norm()


def test_padding_needs_the_attention_mask():
    """Without it (upstream's default) what a clip learns depends on the clips beside it."""
    torch.manual_seed(0)
    for masked in (True, False):
        job = F5Tiny(clips=4, dim=32, depth=2, ignore_padding=masked)
        net = job.nets()["dit"]
        for parameter in net.parameters():
            torch.nn.init.normal_(parameter, std=0.1)
        samples = sorted(job.dataset(), key=lambda sample: len(sample.mel))
        alone = job.loss({"dit": net}, job.collate(samples[:1])).sum
        beside = sum(job.loss({"dit": net}, job.collate([sample])).sum for sample in samples[1:])
        together = job.loss({"dit": net}, job.collate(samples)).sum
        assert torch.isclose(together, alone + beside, rtol=1e-5).item() == masked


def test_the_schedule_warms_up_and_ends_at_nothing():
    job = F5Small(warmup_windows=4, learning_rate=1e-3)
    parameter = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.AdamW([parameter], lr=job.learning_rate)
    schedule = job.schedules({"adamw": optimizer}, windows=10)["adamw"]
    rates = []
    for _ in range(10):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    assert rates[0] == pytest.approx(1e-11)
    assert max(rates) == pytest.approx(1e-3)
    assert rates.index(max(rates)) == 4
    assert optimizer.param_groups[0]["lr"] == pytest.approx(1e-11)


@pytest.mark.parametrize(
    ("kind", "autocast", "checkpointed", "mib_a_frame"),
    [
        (F5Base, False, False, 1.848),
        (F5Base, False, True, 0.202),
        (F5Base, True, False, 1.130),
        (F5Base, True, True, 0.108),
        (F5Small, False, False, 1.174),
        (F5Small, True, False, 0.686),
    ],
)
@pytest.mark.parametrize("shape", [Shape(items=2, length=1600), Shape(items=32, length=100)])
def test_kept_bytes_a_frame(kind, autocast, checkpointed, mib_a_frame, shape):
    """Of the CPU's kernels: dropout keeps its factors in the activations' type, where CUDA keeps one byte each."""
    nbytes = kept(kind(), shape, checkpointed, autocast)
    assert nbytes / shape.units == pytest.approx(mib_a_frame * 2**20, rel=0.02)
