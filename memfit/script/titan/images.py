"""What stands in for the data and the frozen encoders of torchtitan's flux: random images, tokens and weights."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

CLIP_TOKENS = 77
"""Tokens of CLIP's text encoder."""
ENCODERS: dict[str, dict[str, Any]] = {
    "openai/clip-vit-large-patch14": {
        "model_type": "clip_text_model", "vocab_size": 49408, "hidden_size": 768, "intermediate_size": 3072,
        "projection_dim": 768, "num_hidden_layers": 12, "num_attention_heads": 12,
        "max_position_embeddings": CLIP_TOKENS, "hidden_act": "quick_gelu",
    },
    "google/t5-v1_1-xxl": {
        "model_type": "t5", "vocab_size": 32128, "d_model": 4096, "d_kv": 64, "d_ff": 10240, "num_layers": 24,
        "num_heads": 64, "feed_forward_proj": "gated-gelu", "tie_word_embeddings": False,
    },
}  # fmt: skip
"""Sizes of the text encoders, as their published configurations have them: the hub is not asked."""


def reads_images(config: Any) -> bool:
    """Whether a configuration is of flux's trainer, which reads images with their texts."""
    return bool(config._owner.__name__ == "FluxTrainer")


def image_tokens(config: Any) -> int:
    """Tokens of a row: those of the latent image in patches, and of the text, as ``FluxTrainer`` counts them."""
    from torchtitan.models.flux import trainer

    side = config.dataloader.img_size // trainer.IMAGE_LATENT_SIZE_RATIO
    return int(side // trainer.PATCH_WIDTH * (side // trainer.PATCH_HEIGHT) + config.tokenizer.max_t5_encoding_len)


def stand_in_images(config: Any, tokenizer: Any) -> None:
    """Changes what a trace cannot have: images, texts, and the weights of the encoders. No validation runs, since it
    draws images and writes them.

    Args:
        tokenizer: the class that stands in for tokenizers.
    """
    from torchtitan.components.dataloader import BaseDataLoader
    from torchtitan.models.flux import trainer

    class Images(BaseDataLoader):
        """Random images with the tokens of their texts."""

        @dataclass(kw_only=True, slots=True)
        class Config(BaseDataLoader.Config):
            img_size: int = 256
            text: int = 256

        def __init__(self, config: Config, *, local_batch_size: int, **_: Any) -> None:
            self._size, self._text, self._rows = config.img_size, config.text, local_batch_size

        def __iter__(self) -> Iterator[tuple[dict[str, torch.Tensor], torch.Tensor]]:
            while True:
                tokens = {"clip": CLIP_TOKENS, "t5": self._text}
                texts = {name: torch.randint(1000, (self._rows, 1, length)) for name, length in tokens.items()}
                yield texts, torch.rand(self._rows, 3, self._size, self._size)

        def state_dict(self) -> dict[str, Any]:
            return {}

        def load_state_dict(self, state_dict: dict[str, Any]) -> None: ...

    text = config.tokenizer.max_t5_encoding_len
    config.dataloader = Images.Config(img_size=config.dataloader.img_size, text=text)
    config.tokenizer = tokenizer.Config(max_t5_encoding_len=text)
    config.validator.enable = False
    load = trainer.load_ae
    trainer.load_ae = lambda *args, **kwargs: load(*args, **(kwargs | {"random_init": True}))
    model = config.model_spec.model
    config.encoder.clip_encoder = _configured(config.encoder.clip_encoder or model.clip_encoder.version)
    config.encoder.t5_encoder = _configured(config.encoder.t5_encoder or model.t5_encoder.version)


def _configured(version: str) -> str:
    """A folder with the configuration of an encoder that is known here; another one is loaded as it is named."""
    if version not in ENCODERS:
        return version
    folder = Path(tempfile.mkdtemp(prefix="memfit-")) / version.rpartition("/")[2]
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(ENCODERS[version]))
    return str(folder)
