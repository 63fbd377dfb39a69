"""Checkpointing, reentrant or not, as argument 1 says."""

import sys

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(0)
blocks = nn.ModuleList(nn.Sequential(nn.Linear(256, 1024), nn.GELU(), nn.Linear(1024, 256)) for _ in range(6)).to(
    device
)
optimizer = torch.optim.SGD(blocks.parameters(), 0.1, momentum=0.9, foreach=True)
reentrant = sys.argv[1] == "reentrant"
for step in range(3):
    x = torch.randn(128, 256).to(device).requires_grad_()
    for block in blocks:
        x = x + checkpoint(block, x, use_reentrant=reentrant)
    loss = x.square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(step, loss.item())
