"""LatentSync's inference on a whole video, as its training runs it for validation, and the judging of what comes out.

Everything of the training stays resident meanwhile. The faces of the whole video and its decoded frames are kept, on
the device unless the job says host, and joined once at the end.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from memfit.job import Nets
from memfit.jobs.data.frames import mouth_mask
from memfit.jobs.nets.diffusion import ddim
from memfit.jobs.nets.frozen import audio_embeddings, decode_latents, encode_images, hidden_states

AUDIO_FRAMES = 750
"""Video frames in the 30 s that Whisper reads at once."""


class LipSyncJob(Protocol):
    """What the inference needs of the job that it validates: its settings, its denoiser and its loops."""

    @property
    def resolution(self) -> int: ...
    @property
    def frames(self) -> int: ...
    @property
    def guidance(self) -> float: ...
    @property
    def inference_steps(self) -> int: ...
    @property
    def validation_keeps(self) -> str: ...
    @property
    def validation_decode(self) -> int: ...
    @property
    def validation_judge(self) -> int: ...
    @property
    def detector_size(self) -> tuple[int, int]: ...

    def autocast(self, device: torch.device | str) -> AbstractContextManager[Any]: ...

    def repeats(self, count: int) -> Iterable[int]: ...

    def predict(self, nets: Nets, seen: Tensor, timesteps: Tensor, audio: Tensor) -> Tensor:
        """The noise in latents (b, 13, f, h, w), at these timesteps (b,), for this sound (b, f, 50, 384)."""


def lip_sync(job: LipSyncJob, nets: Nets, batch: Mapping[str, Tensor]) -> Tensor:
    """Faces (v, 3, r, r) with mouths painted after the sound, as bytes on the host."""
    faces, device = batch["faces"], next(nets["unet"].parameters()).device
    dtype = next(nets["vae"].parameters()).dtype
    count, side = faces.shape[0], job.resolution // 8
    with job.autocast(device):
        audio = _audio(nets, batch["audio"], batch["positions"], device)
        noise = torch.randn(1, 4, 1, side, side, device=device, dtype=dtype)
        far = job.validation_keeps == "host"
        noise = noise.expand(-1, -1, count, -1, -1) if far else noise.repeat(1, 1, count, 1, 1)
        starts = range(0, count, job.frames)
        painted = []
        for index, run in _turns(job, len(starts)):
            window = slice(starts[index], starts[index] + job.frames)
            if run:
                made = _paint(job, nets, faces[window].to(device), audio[window].to(device, dtype), noise[:, :, window])
            else:
                made = torch.empty(faces[window].shape, device=device, dtype=dtype)
            painted.append(made.cpu() if far else made)
        return _images(job, torch.cat(painted))


def _audio(nets: Nets, mel: Tensor, positions: Tensor, device: torch.device) -> Tensor:
    """(v, 50, 384) on the host: the sound around every frame of the video."""
    pieces = []
    for index in range(mel.shape[0]):
        states = hidden_states(nets["whisper"].encoder, mel[index : index + 1].to(device))  # type: ignore[arg-type]
        near = positions[index * AUDIO_FRAMES : (index + 1) * AUDIO_FRAMES]
        pieces.append(audio_embeddings(states.cpu(), near[None])[0])
    return torch.cat(pieces)


def _paint(job: LipSyncJob, nets: Nets, faces: Tensor, audio: Tensor, latents: Tensor) -> Tensor:
    """At most ``job.frames`` faces (f, 3, r, r) as bytes to painted ones in [-1, 1], at the VAE's precision."""
    vae: Any = nets["vae"]
    dtype, twice = latents.dtype, 2 if job.guidance > 1 else 1
    pixels = faces / 127.5 - 1
    masks = torch.from_numpy(mouth_mask(job.resolution)).to(faces.device).expand(len(faces), -1, -1, -1)
    small = F.interpolate(masks, size=latents.shape[-2:]).to(dtype)
    known = [small]
    for image in (pixels * masks, pixels):
        known.append(encode_images(vae, image.to(dtype), torch.randn_like(latents[0].transpose(0, 1))))
    conditions = [torch.cat([condition.transpose(0, 1)[None]] * twice) for condition in known]
    context = torch.stack([torch.zeros_like(audio), audio]) if twice == 2 else audio[None]
    scheduler = ddim()
    scheduler.set_timesteps(job.inference_steps)
    gap = 1000 // job.inference_steps
    steps = [1 + gap * index for index in reversed(range(job.inference_steps))]
    for index in job.repeats(len(steps)):
        seen = torch.cat([torch.cat([latents] * twice), *conditions], dim=1)
        when = torch.full((twice,), steps[index], device=faces.device)
        noise = job.predict(nets, seen, when, context)
        if twice == 2:
            silent, heard = noise.chunk(2)
            noise = silent + job.guidance * (heard - silent)
        latents = scheduler.step(noise.to(dtype), steps[index], latents).prev_sample
    frames = latents[0].transpose(0, 1)
    pieces = frames.split(job.validation_decode)
    decoded = [
        decode_latents(vae, pieces[index]) if run else torch.empty_like(pixels[: len(pieces[index])], dtype=dtype)
        for index, run in _turns(job, len(pieces))
    ]
    made = torch.cat(decoded)
    kept = masks.to(dtype)
    return made * (1 - kept) + pixels.to(dtype) * kept


def _turns(job: LipSyncJob, count: int) -> Iterator[tuple[int, bool]]:
    """Every turn of a loop, and whether it runs; of one that does not, the loop makes what it would leave behind."""
    run = iter(job.repeats(count))
    following = next(run, None)
    for index in range(count):
        runs = index == following
        yield index, runs
        if runs:
            following = next(run, None)


def _images(job: LipSyncJob, video: Tensor) -> Tensor:
    """[-1, 1] to bytes on the host, frame by frame."""
    images = torch.empty(video.shape, dtype=torch.uint8, device="cpu")
    for index in job.repeats(len(video)):
        images[index] = ((video[index] / 2 + 0.5).clamp(0, 1) * 255).to(torch.uint8).cpu()
    return images


def judge(job: LipSyncJob, nets: Nets, images: Tensor, cepstra: Tensor) -> dict[str, Tensor]:
    """``face_score``, the detector's best, and ``sync_distance`` between lips and sound, means over the video.

    images: bytes (v, 3, r, r) on the host; cepstra (v, 1, 13, 20) on the host. The detector sees frame by frame, the
    evaluator ``validation_judge`` clips of 5 frames at a time.
    """
    device = next(nets["detector"].parameters()).device
    scores, distances = [], []
    for index in job.repeats(len(images)):
        frame = F.interpolate(images[index : index + 1].float(), size=job.detector_size).to(device)
        scores.append(nets["detector"](frame)[0][:, :2].max().cpu())
    evaluator: Any = nets["evaluator"]
    most = job.validation_judge
    for index in job.repeats(-(-(len(images) - 4) // most)):
        first = range(most * index, min(most * index + most, len(images) - 4))
        clips = torch.stack([images[k : k + 5].transpose(0, 1) for k in first]).float()
        clips = F.interpolate(clips.flatten(0, 1), size=(224, 224)).unflatten(0, clips.shape[:2])
        seen = evaluator.see(clips.to(device))
        heard = evaluator.hear(cepstra[first.start : first.stop].to(device))
        distances.append((seen - heard).norm(dim=1).cpu())
    return {"face_score": torch.stack(scores).mean(), "sync_distance": torch.cat(distances).mean()}
