"""A plain loop with validation and a checkpoint."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(0)
net = nn.Sequential(nn.Linear(256, 1024), nn.GELU(), nn.Linear(1024, 1024), nn.GELU(), nn.Linear(1024, 10)).to(device)
data = TensorDataset(torch.randn(96, 256), torch.randint(0, 10, (96,)))
loader = DataLoader(data, batch_size=32, shuffle=True)
validation = DataLoader(data, batch_size=96)
optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3, foreach=True)
for epoch in range(2):
    net.train()
    for x, y in loader:
        x, y = x.to(device), y.to(device)
        loss = nn.functional.cross_entropy(net(x), y)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0, foreach=True)
        optimizer.step()
    net.eval()
    with torch.no_grad():
        right = sum((net(x.to(device)).argmax(1).cpu() == y).sum().item() for x, y in validation)
    print(epoch, f"loss {loss.item():.3f} accuracy {right / len(data):.3f}")
    torch.save({"net": net.state_dict(), "optimizer": optimizer.state_dict()}, "last.pt")
