"""Writes by masks: one number, which fills, and rows, for which the mask becomes indices."""

import torch
from torch import nn

device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(0)
net = nn.Linear(256, 256).to(device)
optimizer = torch.optim.SGD(net.parameters(), 0.1)
keep = torch.arange(1000 * 256).view(1000, 256).to(device) % 10 == 0
even = torch.arange(1000).to(device) % 2 == 0
for _ in range(4):
    x = torch.randn(1000, 256, device=device)
    out = net(x)
    filled = out * 1.0
    filled[~keep] = 0.0
    filled[even] = -1.0
    written = out * 2.0
    written[even] = x[:500]
    loss = (filled + written).pow(2).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
