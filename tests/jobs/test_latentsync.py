"""python -m pytest tests/jobs/test_latentsync.py"""

import pytest
import torch

from memfit.apply.train_state import build
from memfit.apply.window import MicroBatch, run_window
from memfit.blocks import find_module
from memfit.device.hardware.catalogue import find_device
from memfit.device.virtual.card_rules import CardRules
from memfit.device.virtual.virtual_device import virtual_cpu, virtual_gpu
from memfit.errors import InputError
from memfit.job import Shape
from memfit.jobs import latentsync
from memfit.jobs.latentsync import (
    LatentSyncStage1,
    LatentSyncStage1At512,
    LatentSyncStage2,
    LatentSyncStage2Efficient,
)
from memfit.jobs.latentsync_tiny import LatentSyncTiny
from memfit.jobs.nets.diffusion import ddim, one_step
from memfit.planner.predict import footprint_on
from memfit.trace.step import Tracing, trace_job
from tests.jobs.kept import kept

GIB = 2**30


@pytest.mark.parametrize(
    ("resolution", "checkpointed", "published"),
    [(256, False, 7.02), (256, True, 0.69), (512, False, 27.87), (512, True, 2.72)],
)
def test_kept_per_clip_as_computed_upstream(resolution, checkpointed, published):
    """fp32 with fused attention; 2 % for the loss and the U-Net's inputs, which the published figure leaves out."""
    job = LatentSyncStage1(resolution=resolution, precision="fp32", frozen_precision="fp32")
    assert kept(job, Shape(items=1), checkpointed) / GIB == pytest.approx(published, rel=0.02)


@pytest.mark.parametrize("kind", [LatentSyncStage1, LatentSyncStage1At512, LatentSyncStage2, LatentSyncStage2Efficient])
def test_a_step_takes_no_decision_on_values(kind):
    job = kind()
    with virtual_cpu():
        nets = job.nets()
        losses = job.loss(nets, job.batch(Shape(items=1)))
        assert set(losses) == set(job.units(job.batch(Shape(items=1))))
        sum(value / units for value, units in losses.values()).backward()
        assert all((p.grad is not None) == p.requires_grad for p in nets["unet"].parameters())
        for path in (*job.checkpointable(nets), *job.also_checkpointable(nets)):
            find_module(nets, path)


def test_granularity_of_checkpointing():
    """Stage 1: 8 + 12 resnets and 6 + 9 attentions; stage 2: 20 motion modules more, and blocks of the other nets."""
    with torch.device("meta"):
        item, two = LatentSyncStage1(), LatentSyncStage2()
        first, second = item.checkpointable(item.nets()), two.checkpointable(two.nets())
    assert len(first) == 35
    assert not [path for path in first if "mid_block" in path or "sampler" in path or "conv" in path]
    kinds = {prefix: sum(path.startswith(prefix) for path in second) for prefix in ("unet", "vae", "syncnet", "trepa")}
    assert kinds == {"unet": 55, "vae": 5, "syncnet": 19, "trepa": 40}


def test_autocast_is_around_the_unet_alone():
    """Under bf16, the U-Net answers in bf16 and everything else keeps its own type."""
    job = LatentSyncTiny(precision="bf16", clips=2)
    nets, seen = job.nets(), {}
    for name in ("unet", "vae", "syncnet", "trepa"):
        module = nets[name] if name != "vae" else nets[name].decoder
        hook = lambda _, args, out, name=name: seen.update({name: (out[0] if type(out) is tuple else out).dtype})  # noqa: E731
        module.register_forward_hook(hook)
    job.loss(nets, job.batch(Shape(items=1)))
    assert seen == {"unet": torch.bfloat16, "vae": torch.float32, "syncnet": torch.float32, "trepa": torch.float32}


def test_one_step_finds_the_clean_latents():
    scheduler, clean, noise = ddim(), torch.randn(2, 4, 3, 8, 8), torch.randn(2, 4, 3, 8, 8)
    timesteps = torch.tensor([3, 700])
    noisy = scheduler.add_noise(clean, noise, timesteps)
    torch.testing.assert_close(one_step(scheduler, noisy, noise, timesteps), clean, atol=1e-4, rtol=1e-4)


def test_the_loss_falls_on_talking_faces():
    torch.manual_seed(0)
    train_state = build(LatentSyncTiny(clips=4), "cpu")
    batch = train_state.job.collate(train_state.job.dataset())
    micro = MicroBatch(fetch=lambda: batch, padded_units=4, units=train_state.job.units(batch))
    falling = [float(sum(run_window(train_state, [micro]).losses.values())) for _ in range(5)]
    assert falling[-1] < 0.8 * falling[0]


def test_a_split_window_learns_the_same():
    job = LatentSyncTiny(clips=2)
    gradients = []
    for split in (1, 2):
        torch.manual_seed(0)
        nets, clips = job.nets(), job.dataset()
        for start in range(0, 2, 2 // split):
            losses = job.loss(nets, job.collate(clips[start : start + 2 // split]))
            sum(value / 2 for value, _ in losses.values()).backward()
        gradients.append([p.grad for p in nets["unet"].parameters()])
    for item, two in zip(*gradients, strict=True):
        torch.testing.assert_close(item, two, atol=1e-5, rtol=1e-3)


def test_validation_paints_only_the_mouth():
    torch.manual_seed(0)
    job = LatentSyncTiny(clips=2, validation_frames=20)
    nets, batch = job.nets(), job.validation_batch(Shape(items=1))
    with torch.no_grad():
        images = latentsync.lip_sync(job, nets, batch)
        metrics = job.validate(nets, batch)
    upper = slice(0, job.resolution // 2)
    assert images.shape == batch["faces"].shape == (20, 3, 64, 64)
    assert (images[..., upper, :].int() - batch["faces"][..., upper, :].int()).abs().max() <= 1
    assert not torch.equal(images, batch["faces"])
    assert set(metrics) == {"face_score", "sync_distance"}
    assert all(value.isfinite() for value in metrics.values())


def test_validation_asks_for_1_gib_at_once():
    """The group norm of the VAE decoder's last block, which CUDA's autocast runs in fp32: 16 x 256 x 256 x 256 x 4."""
    asked = []
    job = LatentSyncStage1(validation_frames=16)
    job.repeats = lambda count: [0]
    with virtual_gpu(CardRules()) as virtual, torch.no_grad():
        with virtual.device:
            nets, batch = job.nets(), job.validation_batch(Shape(items=1))
        for net in nets.values():
            net.to(virtual.device).eval()
        norm = nets["vae"].decoder.up_blocks[3].resnets[0].norm1
        norm.register_forward_hook(lambda module, args, out: asked.append(out.nbytes))
        job.validate(nets, batch)
    assert asked == [2**30]


@pytest.mark.slow
def test_validation_on_the_host_takes_the_same_of_the_device_at_any_length():
    """Faces, mel, noise and decoded frames wait on the host: 48 and 480 frames have one peak."""
    card, peaks = find_device("rtx4090"), {}
    for keeps in ("host", "device"):
        for frames in (48, 480):
            job = LatentSyncTiny(validation_keeps=keeps, validation_frames=frames, validation_decode=2)
            trace = trace_job(job, Shape(items=1), Tracing(device=card))
            peaks[keeps, frames] = footprint_on(trace, card).phases["validate"].allocated_bytes
    assert peaks["host", 48] == peaks["host", 480]
    assert peaks["device", 480] > peaks["device", 48]


def test_skipped_turns_leave_behind_what_run_ones_do():
    """A trace that runs the first two windows and the last still joins all the video's frames."""
    job = LatentSyncTiny(clips=2, validation_frames=40)
    undisturbed, part = [], []
    with virtual_cpu(), torch.no_grad():
        nets = job.nets()
        for seen in (undisturbed, part):
            seen += latentsync.lip_sync(job, nets, job.validation_batch(Shape(items=1))).shape
            job.repeats = lambda count: sorted({0, min(1, count - 1), count - 1})
    assert undisturbed == part == [40, 3, 64, 64]


@pytest.mark.parametrize(
    ("settings", "word"),
    [({"frames": 25}, "24 positions"), ({"frames": 15}, "pairs"), ({"resolution": 100}, "multiple of 64")],
)
def test_impossible_settings_are_told(settings, word):
    with pytest.raises(InputError, match=word):
        LatentSyncStage2(**settings).nets()
