"""Rows with images, for models of both: pytest tests/script/titan/test_image_rows.py"""

from types import SimpleNamespace
from typing import Any

import pytest

from memfit.errors import is_installed
from memfit.script.titan.image_rows import MARKS, image_line, image_size, reads_image_rows

needs_torchtitan = pytest.mark.skipif(not is_installed("torchtitan"), reason="torchtitan is not installed")


def resized(height: int, width: int, *, min_pixels: int, max_pixels: int, **_: Any) -> tuple[int, int, int, int]:
    """Halves what is too large, and doubles what is too small."""
    while height * width > max_pixels:
        height, width = height // 2 // 32 * 32, width // 2 // 32 * 32
    while height * width < min_pixels:
        height, width = 2 * height, 2 * width
    return height - 1, width, 1, 0


def config(length: int, least: int = 0, most: int = 1 << 30) -> Any:
    loader = SimpleNamespace(
        patch_size=16, spatial_merge_size=2, resize_fn=resized, min_pixels=least, max_pixels=most, max_patches=1 << 20,
        max_patches_per_side=512,
    )  # fmt: skip
    return SimpleNamespace(dataloader=loader, training=SimpleNamespace(seq_len=length))


def test_the_image_is_the_largest_that_fits_in_a_row() -> None:
    assert image_size(config(MARKS + 16)) == (4 * 32, 4 * 32)
    assert image_size(config(MARKS + 15)) == (3 * 32, 5 * 32)
    assert image_size(config(MARKS + 16, most=8 * 32 * 32)) == (2 * 32, 2 * 32)


def test_a_row_without_room_for_the_smallest_image_holds_text() -> None:
    assert image_size(config(MARKS + 16, least=17 * 32 * 32)) == (0, 0)
    assert "rows hold text alone" in image_line(config(MARKS + 16, least=17 * 32 * 32))
    assert "one image that fills it, of 128 x 128 (write --set dataloader.max_pixels=4096" in image_line(
        config(MARKS + 16)
    )


@needs_torchtitan
@pytest.mark.parametrize("name", ["kimi_k2_7/kimi_k2_5_debugmodel", "qwen3_5/qwen35_debugmodel"])
def test_rows_have_the_tokens_of_their_image(name: str) -> None:
    from memfit.script.titan.config import importable, load_config
    from memfit.script.titan.target import parse_target
    from memfit.script.titan.trainer import stand_in

    if name.startswith("qwen3_5") and not is_installed("fla"):
        pytest.skip("flash-linear-attention is not installed")
    with importable():
        changed = load_config(parse_target(f"torchtitan:{name}", None, {}))
        assert reads_image_rows(changed)
        height, width = image_size(changed)
        side, patch = (
            changed.dataloader.patch_size * changed.dataloader.spatial_merge_size,
            changed.dataloader.patch_size,
        )
        stand_in(changed)
        batch, labels = next(iter(changed.dataloader.build(seq_len=512, local_batch_size=2)))
    image = batch["special_tokens"]["image_id"]
    images = (height // side) * (width // side)
    assert images <= 512 - MARKS < images + max(height, width) // side + 1
    assert (batch["input"] == image).sum(1).tolist() == [images, images]
    assert batch["grid_thw"].tolist() == [[1, height // patch, width // patch]] * 2
    assert batch["pixel_values"].shape[:2] == (2, height * width // patch**2)
    assert labels.shape == batch["input"].shape == (2, 512)
