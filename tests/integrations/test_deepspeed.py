"""memfit.deepspeed.guard: windows of real engines of stages 0, 1 and 2 are exact, with failures on one of the ranks.

pytest tests/integrations/test_deepspeed.py
"""

from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("deepspeed")

from testing.rank_copies import run_ranks
from tests.accumulation.nets import RANK_SIZES, Net, mean_loss, windows


def guarded(file: Path, world: int, failures: str) -> dict[str, Any]:
    arguments = [str(file), failures]
    run_ranks(world, "tests.integrations.guarded_engine", arguments, timeout=240, apart=True, DS_ACCELERATOR="cpu")
    return torch.load(file)


def reference(world: int) -> Net:
    """Each window of all ranks as one batch."""
    torch.manual_seed(0)
    net = Net().float()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    for ranks in zip(*(windows(3, RANK_SIZES[rank]) for rank in range(world)), strict=True):
        x, y = (torch.cat([batch[part] for batches in ranks for batch in batches]).float() for part in (0, 1))
        mean_loss(net, (x, y)).backward()
        torch.nn.utils.clip_grad_norm_(net.parameters(), 0.05)
        optimizer.step()
        optimizer.zero_grad()
    return net


def check_weights(saved: dict[str, Any], world: int) -> None:
    assert set(saved["weights"]) == {0, 1, 2}
    for own in saved["weights"].values():
        check_close(own, world)


def check_close(weights: list[torch.Tensor], world: int) -> None:
    for weight, wanted in zip(weights, reference(world).parameters(), strict=True):
        torch.testing.assert_close(weight, wanted.detach(), atol=1e-6, rtol=0)


def test_an_engine_learns_what_one_batch_learns(tmp_path: Path) -> None:
    """With failures in two backwards and in a step, and from checkpoints; its steps are watched."""
    saved = guarded(tmp_path / "saved.pt", 1, "1,6")
    check_weights(saved, 1)
    check_close(saved["resumed"], 1)
    assert "Tried to allocate" in saved["lost"]
    refused = saved["refused"]
    assert "the engine accumulates 3 micro-batches by itself" in refused["accumulation"]
    assert "stage 3 gathers weights in every forward" in refused["stage 3"]
    assert "adds gradients up in buffers of its own" in refused["bf16"]
    assert "Net is no engine" in refused["a model"]
    assert all("\n" not in text for text in refused.values())


@pytest.mark.slow
@pytest.mark.parametrize("failures", ["", "1,4"])
def test_two_ranks_learn_what_one_batch_learns(tmp_path: Path, failures: str) -> None:
    check_weights(guarded(tmp_path / "saved.pt", 2, failures), 2)
