"""A GAN: the discriminator's step, then the generator's."""

import torch
from torch import nn

device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(0)
generator = nn.Sequential(nn.Linear(64, 512), nn.LeakyReLU(0.1), nn.Linear(512, 2048), nn.Tanh()).to(device)
judge = nn.Sequential(nn.Linear(2048, 512), nn.LeakyReLU(0.1), nn.Linear(512, 1)).to(device)
optimizer_g = torch.optim.Adam(generator.parameters(), 2e-4, foreach=True)
optimizer_d = torch.optim.Adam(judge.parameters(), 2e-4, foreach=True)
for step in range(4):
    real, noise = torch.rand(64, 2048).to(device), torch.randn(64, 64).to(device)
    with torch.no_grad():
        fake = generator(noise)
    loss_d = (1 - judge(real)).square().mean() + judge(fake).square().mean()
    optimizer_d.zero_grad()
    loss_d.backward()
    optimizer_d.step()
    loss_g = (1 - judge(generator(noise))).square().mean()
    optimizer_g.zero_grad()
    loss_g.backward()
    optimizer_g.step()
    print(step, loss_d.item(), loss_g.item())
