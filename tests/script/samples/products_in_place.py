"""Products and quotients by numbers, in place on views: autograd makes the node of such a view anew."""

import torch
from torch import nn

device = "cuda" if torch.cuda.is_available() else "cpu"
first, second = nn.Linear(32, 64).to(device), nn.Linear(64, 8).to(device)
optimizer = torch.optim.SGD([*first.parameters(), *second.parameters()], 0.1)
for _ in range(3):
    hidden = first(torch.randn(16, 4, 32).to(device)).view(16, 8, 32).transpose(1, 2)
    hidden *= 2.5
    hidden[:, :16] /= 3
    rows = hidden.relu().reshape(-1, 64)[:, :]
    rows.mul_(0.5).div_(7)
    second(rows).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
