"""python -m pytest tests/jobs/test_musetalk.py"""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from memfit.apply.checkpointing import recompute
from memfit.apply.train_state import build
from memfit.apply.window import MicroBatch, run_window
from memfit.blocks import find_module
from memfit.device.virtual.virtual_device import virtual_cpu
from memfit.job import Shape
from memfit.jobs.musetalk import MuseTalkStage1, MuseTalkStage2, MuseTalkTiny
from tests.jobs.kept import kept_bytes

MIB = 2**20


def test_kept_per_image_as_computed_upstream():
    with FakeTensorMode():
        job = MuseTalkStage1()
        nets = job.nets()
        latents, sound = torch.zeros(1, 8, 32, 32), torch.zeros(1, 50, 384)
        with recompute(nets, dict.fromkeys(job.checkpointable(nets), "full")):
            unet = kept_bytes(lambda: nets["unet"](latents, torch.zeros(1, dtype=torch.long), sound).sample, nets)
        decoder = kept_bytes(lambda: nets["vae"].decode(torch.zeros(1, 4, 32, 32, requires_grad=True)).sample, nets)
    assert unet / MIB == pytest.approx(74, rel=0.02)
    assert decoder / MIB == pytest.approx(1424, rel=0.02)


def test_checkpointing_the_decoder_is_the_option_that_is_missing_upstream():
    """With every block of it recomputed, their inputs stay: 350 MiB an image instead of 1422."""
    with FakeTensorMode():
        job = MuseTalkStage1()
        nets = job.nets()
        paths = [path for path in job.also_checkpointable(nets) if path.startswith("vae.decoder")]
        with recompute(nets, dict.fromkeys(paths, "full")):
            left = kept_bytes(lambda: nets["vae"].decode(torch.zeros(1, 4, 32, 32, requires_grad=True)).sample, nets)
    assert left == 367_034_624


@pytest.mark.parametrize("kind", [MuseTalkStage1, MuseTalkStage2])
def test_a_step_takes_no_decision_on_values(kind):
    with virtual_cpu():
        train_state = build(kind(), "cpu")
        micro = MicroBatch(fetch=lambda: train_state.job.batch(Shape(items=1)), padded_units=1, units=1)
        seen = run_window(train_state, [micro, micro])
        assert all(train_state.optimizers[name].state for name in train_state.optimizers)
        for path in (
            *train_state.job.checkpointable(train_state.nets),
            *train_state.job.also_checkpointable(train_state.nets),
        ):
            find_module(train_state.nets, path)
    turns = {"generator", "discriminator", "mouth_discriminator"} if kind is MuseTalkStage2 else {"generator"}
    assert set(seen.norms) == turns == {turn.name for turn in train_state.job.turns(list(train_state.optimizers))}


def test_the_generators_turn_makes_no_gradient_of_a_discriminator():
    job = MuseTalkTiny(clips=2)
    nets = job.nets()
    losses = job.turns(["unet"])[0].loss(nets, job.collate(job.dataset()), {})
    sum(value / units for value, units in losses.values()).backward()
    assert all(p.grad is not None for p in nets["unet"].parameters())
    for name in ("discriminator", "mouth_discriminator"):
        assert all(p.grad is None and p.requires_grad for p in nets[name].parameters())


@pytest.mark.slow
def test_the_loss_falls_on_talking_faces():
    torch.manual_seed(0)
    train_state = build(MuseTalkTiny(clips=4), "cpu")
    batch = train_state.job.collate(train_state.job.dataset())
    micro = MicroBatch(fetch=lambda: batch, padded_units=4, units=train_state.job.units(batch))
    windows = [run_window(train_state, [micro]).losses for _ in range(8)]
    assert windows[-1]["l1"] < 0.95 * windows[0]["l1"]
    assert sum(windows[-1].values()) < 0.9 * sum(windows[0].values())


def test_autocast_is_around_the_unet_alone():
    job = MuseTalkTiny(precision="bf16")
    nets, seen = job.nets(), {}
    nets["unet"].register_forward_hook(lambda module, args, out: seen.update(unet=out.sample.dtype))
    nets["vae"].decoder.register_forward_hook(lambda module, args, out: seen.update(vae=out.dtype))
    assert job.paint(nets, job.batch(Shape(items=1))).dtype is torch.float32
    assert seen == {"unet": torch.bfloat16, "vae": torch.float32}


def test_mouths_are_cut_out_and_enlarged():
    """A box that halves the image shows, at every second pixel pair, what the image has there."""
    job = MuseTalkTiny()
    rows = torch.arange(64.0)[:, None].expand(64, 64)
    box = torch.tensor([0.5, 1.0, 0.25, 0.75]).expand(1, 1, 4)
    mouth = job._mouths(rows.expand(1, 3, 64, 64), {"mouths": box})
    torch.testing.assert_close(mouth[0, 0, 1:-1, 0], torch.arange(32.25, 63.25, 0.5)[:62])
    columns = job._mouths(rows.T.expand(1, 3, 64, 64), {"mouths": box})
    torch.testing.assert_close(columns[0, 0, 0, 1:-1], torch.arange(16.25, 47.25, 0.5)[:62])


def test_validation_paints_twice():
    job = MuseTalkTiny(clips=2)
    nets, batch = job.nets(), job.collate(job.dataset())
    with torch.no_grad():
        metrics = job.validate(nets, batch)
    assert set(metrics) == {"l1", "l1_inference"}
    assert all(0 < value < 2 for value in metrics.values())
