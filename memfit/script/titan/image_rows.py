"""Rows of tokens with an image each, in place of what torchtitan's ``MMDataLoader`` reads.

The image is the largest that the loader makes of one and that fits in a row. torchtitan's own collator cuts it into
patches. Tokens and pixels are random.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch

MARKS = 3
"""Tokens of a row beside those of its image and its text: before the image, after it, and at the end."""


def reads_image_rows(config: Any) -> bool:
    """Whether a configuration reads rows of tokens with images, for a model of both."""
    return any(kind.__name__ == "MMDataLoader" for kind in config.dataloader._owner.__mro__)


def image_size(config: Any) -> tuple[int, int]:
    """Height and width in pixels of the largest image that fits in a row; zeros where none does, since the loader makes
    no smaller ones."""
    loader, side = config.dataloader, config.dataloader.patch_size * config.dataloader.spatial_merge_size
    for tokens in range(config.training.seq_len - MARKS, 0, -1):
        rows = math.isqrt(tokens)
        height, width, more_height, more_width = loader.resize_fn(
            rows * side, tokens // rows * side, patch_size=loader.patch_size, merge_size=loader.spatial_merge_size,
            min_pixels=loader.min_pixels, max_pixels=loader.max_pixels, max_patches=loader.max_patches,
            max_patches_per_side=loader.max_patches_per_side,
        )  # fmt: skip
        size = height + more_height, width + more_width
        if _tokens(size, side) <= tokens:
            return size
    return 0, 0


def _tokens(size: tuple[int, int], side: int) -> int:
    """Tokens of an image."""
    return (size[0] // side) * (size[1] // side)


def image_line(config: Any) -> str:
    """What the rows hold, and how to change it."""
    height, width = image_size(config)
    rows = "rows hold text alone, since no image of dataloader.min_pixels fits in one"
    if height:
        write = f"write --set dataloader.max_pixels={height * width // 4} for a quarter of it"
        rows = f"each row holds one image that fills it, of {height} x {width} ({write})"
    return f"no run that reads images was measured; {rows}"


def stand_in_image_rows(config: Any, tokenizer: Any) -> None:
    """Changes what a trace cannot have: images, texts and the tokenizer.

    Args:
        tokenizer: the class that stands in for tokenizers.
    """
    from torchtitan.components.dataloader import BaseDataLoader
    from torchtitan.components.tokenizer import MultiModalTokenizer
    from torchtitan.hf_datasets.multimodal.mm_collator import MultiModalCollator

    loader, names = config.dataloader, MultiModalTokenizer.TOKEN_FIELDS
    size, vocabulary = image_size(config), config.model_spec.model.vocab_size
    texts = [getattr(config.tokenizer, f"{name}_token", name) for name in names]
    numbers = {text: vocabulary - 1 - i for i, text in enumerate(dict.fromkeys(texts))}
    marks = SimpleNamespace(
        TOKEN_FIELDS=names, **{f"{name}_id": numbers[text] for name, text in zip(names, texts, strict=True)}
    )
    images = _tokens(size, loader.patch_size * loader.spatial_merge_size)

    def sample(length: int) -> dict[str, Any]:
        tokens = torch.randint(vocabulary - len(numbers), (length,))
        pixels = []
        if images:
            tokens[: images + 2] = marks.image_id
            tokens[0], tokens[images + 1] = marks.vision_start_id, marks.vision_end_id
            pixels.append(torch.rand(1, *size, 3))
        labels = torch.where(tokens < vocabulary - len(numbers), tokens, -100)
        return {"input_ids": tokens, "labels": labels, "positions": torch.arange(length), "pixel_values": pixels}

    class ImageRows(BaseDataLoader):
        """Rows of random tokens with an image each."""

        @dataclass(kw_only=True, slots=True)
        class Config(BaseDataLoader.Config):
            pass

        def __init__(self, config: Config, *, seq_len: int, local_batch_size: int, **_: Any) -> None:
            self._rows, self._length = local_batch_size, seq_len
            self._collate = MultiModalCollator(
                batch_size=local_batch_size, seq_len=seq_len, max_images_per_batch=loader.max_images_per_batch,
                patch_size=loader.patch_size, temporal_patch_size=loader.temporal_patch_size,
                spatial_merge_size=loader.spatial_merge_size, tokenizer=marks, patch_order=loader.patch_order,
                build_mrope_positions=loader.build_mrope_positions,
            )  # fmt: skip

        def __iter__(self) -> Iterator[Any]:
            while True:
                yield self._collate([sample(self._length) for _ in range(self._rows)])

        def state_dict(self) -> dict[str, Any]:
            return {}

        def load_state_dict(self, state_dict: dict[str, Any]) -> None: ...

    config.dataloader, config.tokenizer = ImageRows.Config(), tokenizer.Config()
