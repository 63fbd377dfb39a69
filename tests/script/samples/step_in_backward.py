"""One optimizer for each parameter, which steps as soon as its gradient is there."""

import torch
from torch import nn

device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(0)
net = nn.Sequential(*[nn.Sequential(nn.Linear(512, 512), nn.ReLU()) for _ in range(5)]).to(device)
optimizers = {p: torch.optim.Adam([p], 1e-3, foreach=False) for p in net.parameters()}


def step_now(parameter):
    optimizers[parameter].step()
    optimizers[parameter].zero_grad()


for parameter in net.parameters():
    parameter.register_post_accumulate_grad_hook(step_now)
for step in range(3):
    loss = net(torch.randn(64, 512).to(device)).square().mean()
    loss.backward()
    print(step, loss.item())
