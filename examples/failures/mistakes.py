"""A training script with two mistakes, for memfit lint."""

import torch
from torch.utils.data import DataLoader

model = torch.nn.Linear(8, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loader = DataLoader(torch.randn(100, 8), batch_size=8)
total = torch.zeros(())

for step, batch in enumerate(loader):
    loss = model(batch).square().mean()
    (loss / 4).backward()
    total += loss
    if (step + 1) % 4 == 0:
        optimizer.step()
        optimizer.zero_grad()
