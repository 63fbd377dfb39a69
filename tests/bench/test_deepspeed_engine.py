"""DeepSpeed's own engine in the loops of recipes."""

import pytest

from tests.bench.loop_process import peaks

PARAMETERS = 5_496_237
"""Of timm's vit_tiny_patch16_224 for images of 32 x 32 and 45 classes; its largest has 192 x 768 of them."""


def test_zero_offload_copies_the_float32_partition_to_the_card_in_its_step():
    """DeepSpeed up to 0.16, ``stage_1_and_2.py``: the step casts the partition on the card that it lies on then."""
    zero = {"stage": 2, "offload_optimizer": {"device": "cpu"}, "reduce_bucket_size": 200_000}
    config = {"bf16": {"enabled": True}, "optimizer": {"type": "Adam"}, "zero_optimization": zero}
    given = {
        "net": "vit_tiny_patch16_224", "kind": "timm", "classes": 45, "batch": 1, "precision": "bf16",
        "net_arguments": {"img_size": 32}, "image": 32, "cublas_workspace": False, "step_is_function": True,
        "deepspeed": config,
    }  # fmt: skip
    ((allocated, _),) = peaks("deepspeed-0.15", given)
    assert allocated == pytest.approx((2 + 4) * PARAMETERS + 2 * 192 * 768, rel=0.03)
