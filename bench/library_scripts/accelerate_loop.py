"""A loop with Accelerate, for bench/versions.py."""

import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader, TensorDataset

accelerator = Accelerator()
net = torch.nn.Sequential(torch.nn.Linear(256, 1024), torch.nn.GELU(), torch.nn.Linear(1024, 256))
optimizer = torch.optim.AdamW(net.parameters())
loader = DataLoader(TensorDataset(torch.randn(64, 256)), batch_size=16)
net, optimizer, loader = accelerator.prepare(net, optimizer, loader)
for (batch,) in loader:
    loss = (net(batch) - batch).square().mean()
    accelerator.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
