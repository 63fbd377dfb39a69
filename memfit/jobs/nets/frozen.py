"""Nets that are not trained, in their published shapes with random weights: Stable Diffusion's VAE, and Whisper."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from diffusers import AutoencoderKL
from torch import Tensor, nn
from transformers import WhisperConfig, WhisperModel
from transformers.models.whisper.modeling_whisper import WhisperEncoder

Net = TypeVar("Net", bound=nn.Module)

SCALING = 0.18215
"""Latents are multiplied by it so that their deviation is about 1."""


def frozen(net: Net, dtype: torch.dtype = torch.float32) -> Net:
    """The net without gradients, in evaluation mode, its weights as ``dtype``."""
    if dtype is not torch.float32:
        nn.Module.to(net, dtype)
    net.requires_grad_(False).eval()
    return net


def sd_vae(*, channels: Sequence[int] = (128, 256, 512, 512), groups: int = 32) -> Any:
    """sd-vae-ft-mse: images (n, 3, h, w) to latents (n, 4, h/8, w/8) and back. https://arxiv.org/abs/2112.10752"""
    return AutoencoderKL(
        down_block_types=("DownEncoderBlock2D",) * len(channels),
        up_block_types=("UpDecoderBlock2D",) * len(channels),
        block_out_channels=tuple(channels),
        layers_per_block=2,
        norm_num_groups=groups,
        scaling_factor=SCALING,
        sample_size=256,
    )


def whisper_config(*, dim: int = 384, layers: int = 4, heads: int = 6) -> WhisperConfig:
    """whisper-tiny, or a narrower one. https://arxiv.org/abs/2212.04356"""
    return WhisperConfig(
        d_model=dim,
        encoder_layers=layers,
        decoder_layers=layers,
        encoder_attention_heads=heads,
        decoder_attention_heads=heads,
        encoder_ffn_dim=4 * dim,
        decoder_ffn_dim=4 * dim,
        vocab_size=51865,
    )


class FixedPositions(nn.Module):
    """The encoder's sines as OpenAI's Whisper holds them: a buffer (count, dim), where transformers has a parameter."""

    weight: Tensor

    def __init__(self, count: int, dim: int) -> None:
        super().__init__()
        self.num_embeddings = count
        self.register_buffer("weight", torch.zeros(count, dim))

    def forward(self, positions: Tensor) -> Tensor:
        return F.embedding(positions, self.weight)


def whisper(**shape: int) -> WhisperModel:
    """Encoder and decoder, both of which stay in memory. Only the encoder runs: log-mel (n, 80, 3000) of 30 s to
    (n, 1500, dim)."""
    return WhisperModel(whisper_config(**shape))


def openai_whisper(**shape: int) -> WhisperModel:
    """The same net with the buffers of OpenAI's own code: the encoder's positions, and the decoder's causal mask.

    https://github.com/openai/whisper/blob/main/whisper/model.py
    """
    net = whisper(**shape)
    positions = FixedPositions(net.config.max_source_positions, net.config.d_model)
    net.encoder.register_module("embed_positions", positions)
    length = net.config.max_target_positions
    net.decoder.register_buffer("mask", torch.zeros(length, length), persistent=False)
    return net


def hidden_states(encoder: WhisperEncoder, mel: Tensor) -> Tensor:
    """Log-mel (b, 80, 3000) to the embedding and every layer's output, (b, 1500, layers + 1, dim)."""
    return torch.stack(encoder(mel, output_hidden_states=True).hidden_states, dim=2)


def audio_embeddings(states: Tensor, positions: Tensor) -> Tensor:
    """What the U-Net reads of the sound: for every video frame, all hidden states of the encoder around it.

    states (b, 1500, s, dim); positions (b, f, p), 50 a second. Gives (b, f, p·s, dim): 10 positions of whisper-tiny's
    5 states are 50 x 384.
    """
    rows = torch.arange(states.shape[0], device=states.device)[:, None, None]
    return states[rows, positions].flatten(2, 3)


def encode_images(vae: Any, images: Tensor, noise: Tensor | None = None) -> Tensor:
    """Images (n, 3, h, w) to scaled latents (n, 4, h/8, w/8): drawn by this noise, or the distribution's mode."""
    posterior = vae.encode(images).latent_dist
    latents = posterior.mode() if noise is None else posterior.mean + posterior.std * noise
    scaled: Tensor = latents * SCALING
    return scaled


def decode_latents(vae: Any, latents: Tensor) -> Tensor:
    """Scaled latents (n, 4, h, w) to images (n, 3, 8h, 8w)."""
    images: Tensor = vae.decode(latents / SCALING).sample
    return images
