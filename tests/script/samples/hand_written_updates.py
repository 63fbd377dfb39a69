"""Gradient descent that is written by hand."""

import torch
from torch import nn

device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(0)
net = nn.Sequential(nn.Linear(128, 512), nn.ReLU(), nn.Linear(512, 10)).to(device)
for step in range(6):
    x, y = torch.randn(64, 128).to(device), torch.randint(0, 10, (64,)).to(device)
    loss = nn.functional.cross_entropy(net(x), y)
    net.zero_grad()
    loss.backward()
    with torch.no_grad():
        for weight in net.parameters():
            weight -= 0.01 * weight.grad
    print(step, loss.item())
