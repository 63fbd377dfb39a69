"""Stable Diffusion's noise schedule, and the way back in one step. https://arxiv.org/abs/2010.02502"""

from __future__ import annotations

from typing import Any

from diffusers import DDIMScheduler
from torch import Tensor


def ddim() -> Any:
    """The schedule of 1000 steps, as a DDIM scheduler of diffusers."""
    return DDIMScheduler(
        beta_start=0.00085,
        beta_end=0.012,
        beta_schedule="scaled_linear",
        clip_sample=False,
        set_alpha_to_one=False,
        steps_offset=1,
    )


def one_step(scheduler: Any, noisy: Tensor, noise: Tensor, timesteps: Tensor) -> Tensor:
    """The clean latents (b, c, f, h, w) that this noise in these noisy ones leaves: (x - sqrt(1 - a) e) / sqrt(a)."""
    kept = scheduler.alphas_cumprod.to(noisy.device)[timesteps].to(noise.dtype)[:, None, None, None, None]
    return (noisy - (1 - kept).sqrt() * noise) / kept.sqrt()
