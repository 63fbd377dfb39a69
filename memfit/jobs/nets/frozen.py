"""Nets that are not trained, in their published shapes with random weights: the Stable Diffusion VAE and the Whisper encoder."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from diffusers import AutoencoderKL
from torch import Tensor, nn
from transformers import WhisperConfig, WhisperModel
from transformers.models.whisper.modeling_whisper import WhisperEncoder

Net = TypeVar("Net", bound=nn.Module)

SCALING = 0.18215
"""Latents are multiplied by it so that their deviation is about 1."""


def frozen(net: Net) -> Net:
    """The net without gradients, in evaluation mode."""
    net.requires_grad_(False).eval()
    return net


def sd_vae(*, channels: Sequence[int] = (128, 256, 512, 512), groups: int = 32) -> AutoencoderKL:
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


def whisper_encoder(**shape: int) -> WhisperEncoder:
    """The encoder alone: log-mel (n, 80, 3000) of 30 s to (n, 1500, dim)."""
    return WhisperEncoder(whisper_config(**shape))


def whisper(**shape: int) -> WhisperModel:
    """Encoder and decoder, both of which stay in memory; only the encoder runs."""
    return WhisperModel(whisper_config(**shape))


def audio_embeddings(encoder: WhisperEncoder, mel: Tensor, positions: Tensor) -> Tensor:
    """What the U-Net reads of the audio: for every video frame, all hidden states of the encoder around it.

    mel (b, 80, 3000); positions (b, f, p): the encoder's positions (50 a second, 0 to 1499) that belong to each frame.
    Gives (b, f, p x (layers + 1), dim): 10 positions of whisper-tiny's 5 states are 50 x 384.
    """
    from torch import arange, stack

    states = stack(encoder(mel, output_hidden_states=True).hidden_states, dim=2)
    rows = arange(mel.shape[0], device=mel.device)[:, None, None]
    return states[rows, positions].flatten(2, 3)
