"""memfit.guard on two ranks: DDP with failures on one of them, and FSDP2.

pytest tests/accumulation/test_guard_ranks.py
"""

from pathlib import Path

import pytest
import torch

from testing.rank_copies import run_ranks
from tests.accumulation.nets import Net, mean_loss, windows

CASES = [
    ("ddp", "1,2"),
    *(pytest.param(*case, marks=pytest.mark.slow) for case in (("ddp", ""), ("ddp", "0,4"), ("fsdp2", ""))),
]


@pytest.mark.parametrize(("wrapper", "failures"), CASES)
def test_two_ranks_learn_what_one_batch_learns(tmp_path: Path, wrapper: str, failures: str) -> None:
    file = tmp_path / "weights.pt"
    run_ranks(2, "tests.accumulation.guarded_rank", [wrapper, str(file), failures], timeout=240)
    torch.manual_seed(0)
    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    both = [(4, 3, 5) if wrapper == "ddp" else (4, 3), (2, 6)]
    for first, second in zip(*(windows(3, sizes) for sizes in both), strict=True):
        rows = [torch.cat(part) for part in zip(*first, *second, strict=True)]
        mean_loss(net, (rows[0], rows[1])).backward()
        optimizer.step()
        optimizer.zero_grad()
    for own, expected in zip(torch.load(file), net.parameters(), strict=True):
        torch.testing.assert_close(own, expected.detach(), atol=1e-14, rtol=0)
