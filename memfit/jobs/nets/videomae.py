"""VideoMAE v2, whose features LatentSync compares (TREPA). https://arxiv.org/abs/2303.16727"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor
from transformers import VideoMAEConfig, VideoMAEForVideoClassification


def videomae(
    *, dim: int = 1408, layers: int = 40, heads: int = 16, mlp: int = 6144, size: int = 224, patch: int = 14
) -> VideoMAEForVideoClassification:
    """ViT-g with the head of its 174 classes; 16 frames of 224² are 8 x 16 x 16 = 2048 tokens."""
    config = VideoMAEConfig(
        image_size=size,
        patch_size=patch,
        num_frames=16,
        tubelet_size=2,
        hidden_size=dim,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        intermediate_size=mlp,
        use_mean_pooling=True,
        num_labels=174,
    )
    return VideoMAEForVideoClassification(config)


def trepa_loss(net: VideoMAEForVideoClassification, made: Tensor, real: Tensor) -> Tensor:
    """Mean squared difference of the unit feature vectors of two videos (b, 16, 3, h, w) in [-1, 1]."""
    return F.mse_loss(_features(net, made), _features(net, real))


def _features(net: VideoMAEForVideoClassification, video: Tensor) -> Tensor:
    """(b, dim): the mean of the tokens, normed."""
    b, size = video.shape[0], net.config.image_size
    frames = F.interpolate(video.flatten(0, 1), size=(size, size), mode="bicubic")
    frames = (frames / 2 + 0.5).clamp(0, 1).unflatten(0, (b, -1))
    tokens = net.videomae(frames).last_hidden_state
    return F.normalize(net.fc_norm(tokens.mean(1)), dim=1)
