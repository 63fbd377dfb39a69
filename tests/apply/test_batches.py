"""python -m pytest tests/apply/test_batches.py"""

import torch

from memfit.apply.batches import is_opaque, on_device


class Graphs:
    """Only its own ``to`` reaches its tensors."""

    def __init__(self, nodes):
        self.nodes = nodes

    def to(self, device):
        return Graphs(self.nodes.to(device))


def test_what_only_moves_itself_is_moved_by_its_own_means():
    batch = {"graphs": [Graphs(torch.ones(2))], "y": (torch.zeros(3), "name", 4)}
    moved = on_device(batch, torch.device("meta"))
    assert (moved["graphs"][0].nodes.device.type, moved["y"][0].device.type) == ("meta", "meta")
    assert moved["y"][1:] == ("name", 4)
    assert batch["graphs"][0].nodes.device.type == "cpu"


def test_a_batch_that_moves_itself_is_not_cut():
    assert is_opaque([1, {"graphs": Graphs(torch.ones(2))}])
    assert not is_opaque({"x": torch.ones(2), "names": ["a", "b"], "count": 3, "none": None})
