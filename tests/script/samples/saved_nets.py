"""Whole nets in a checkpoint, as object detectors are saved: halves of copies of the net and of its average."""

import copy

import torch
from torch import nn

device = "cuda" if torch.cuda.is_available() else "cpu"
net = nn.Sequential(nn.Conv2d(3, 64, 3), nn.BatchNorm2d(64), nn.ReLU(), nn.Flatten(), nn.Linear(2304, 100)).to(device)
optimizer = torch.optim.SGD(net.parameters(), 0.1, momentum=0.9)
average = copy.deepcopy(net).eval()
for epoch in range(4):
    for _ in range(2):
        net(torch.randn(2, 3, 8, 8).to(device)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            for of_average, of_net in zip(average.parameters(), net.parameters(), strict=True):
                of_average.lerp_(of_net, 0.1)
    if epoch % 2:
        torch.save({"model": copy.deepcopy(net).half(), "ema": copy.deepcopy(average).half()}, "last.pt")
    else:
        torch.save([copy.deepcopy(net), copy.deepcopy(average)], "best.pt")
