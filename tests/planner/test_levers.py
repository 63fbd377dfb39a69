"""Every lever is told: bytes in each phase, cost, whether it changes what is learned, and why it was taken or left."""

from typing import ClassVar

from memfit.planner.answer_json import plan_json
from tests.planner.test_host_state import Wide, planned

NAMES = {
    "for-each optimizer", "fused optimizer", "8-bit optimizer", "expandable allocator", "no DDP for one device",
    "gradients as bucket views", "average of the weights on the host", "checkpointing by module",
    "offload of saved activations", "optimizer state on the host", "accumulation", "sharding", "bf16 autocast",
    "free gradients", "sliced decode in validation", "smaller validation batch",
    "optimizer state aside in validation", "validation in a separate process", "skip validation",
}  # fmt: skip


class Validated(Wide):
    """Its validation decodes all items at once, or so many, into 128 MiB each."""

    at_once: int = 4
    zero_grad: str = "after_forward"
    validates: ClassVar = True
    validation_levers: ClassVar = {"sliced decode in validation": {"at_once": 1}}

    def validate(self, nets, batch):
        for part in batch.split(self.at_once):
            nets["net"](part).repeat(1, 16384)
        return {}


def test_all_of_them_in_the_json():
    found = plan_json(planned(Validated(ema=0.9), 4096))
    levers = {lever["name"]: lever for lever in found["levers"]}
    assert levers.keys() == NAMES
    assert all(lever["reason"] and lever["costs"] for lever in levers.values())
    assert {name for name, lever in levers.items() if lever["changes_learning"]} == {"8-bit optimizer", "bf16 autocast"}
    taken = {name for name, lever in levers.items() if lever["taken"]}
    assert {"fused optimizer", "no DDP for one device", "free gradients"} <= taken
    for name in NAMES - {"gradients as bucket views", "sharding", "sliced decode in validation"}:
        assert set(levers[name]["saves"]) <= {"train", "validate", "save"}
        assert levers[name]["saves"], name


def test_what_a_lever_of_validation_brought_is_what_was_replayed():
    """Training takes 1,024 MiB and next to nothing, validation 768 and 128 for each item that is decoded at once."""
    plan = planned(Validated(zero_grad="after_step"), 1150).plan
    lever = next(one for one in plan.levers if one.name.startswith("sliced"))
    assert lever.taken
    assert lever.saves == {"validate": 3 * ((128 << 20) + 2048 * 4)}
    assert plan.validation.settings == {"at_once": 1}
    assert plan.optimizer_state == "device"
