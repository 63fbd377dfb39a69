"""Each step samples from the net that it trains, without gradients, and keeps an average of the weights."""

import copy

import torch
from torch import nn

device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(0)
student = nn.Sequential(nn.Linear(128, 1024), nn.SiLU(), nn.Linear(1024, 128)).to(device)
average = copy.deepcopy(student).requires_grad_(False)
optimizer = torch.optim.AdamW(student.parameters(), 1e-3, foreach=True)
for step in range(4):
    noise = torch.randn(256, 128).to(device)
    with torch.no_grad():
        sample = student(noise)
        target = average(sample)
    loss = nn.functional.mse_loss(student(noise), target)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    with torch.no_grad():
        for ours, theirs in zip(average.parameters(), student.parameters(), strict=False):
            ours.lerp_(theirs, 0.01)
    print(step, loss.item())
