"""A validation of the average of the weights, a copy of the trained net, and merged adapters that are saved."""

import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(0)
net = nn.Sequential(nn.Linear(128, 512), nn.SiLU(), nn.Linear(512, 128)).to(device)
down, up = (nn.Parameter(torch.randn(*size, device=device)) for size in ((16, 128), (128, 16)))
average = AveragedModel(net)
optimizer = torch.optim.AdamW([*net.parameters(), down, up], 1e-3, foreach=True)
held_out = torch.randn(1024, 128)
for _ in range(3):
    data = torch.randn(256, 128).to(device) * 2 - 1
    loss = nn.functional.mse_loss(net(data) + data @ down.t() @ up.t(), data)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
average.update_parameters(net)
average.eval()
with torch.no_grad():
    print(nn.functional.mse_loss(average(held_out.to(device)), held_out.to(device)).item())
torch.save(average.state_dict(), "average.pt")
with torch.no_grad():
    merged = {f"scale {scale}": scale * up @ down for scale in range(8)}
torch.save(merged, "merged.pt")
