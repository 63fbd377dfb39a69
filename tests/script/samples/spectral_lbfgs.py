"""A layer of complex weights that torch.optim.LBFGS trains: it learns the two parts of each number."""

import torch
from torch import nn

torch.manual_seed(0)


class Spectral(nn.Module):
    """Mixes channels for each frequency, as a Fourier neural operator does."""

    def __init__(self, channels, modes):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(channels, channels, modes, dtype=torch.cfloat) / channels)
        self.rest = nn.Conv1d(channels, channels, 1)

    def forward(self, x):
        spectrum = torch.fft.rfft(x)[..., : self.weight.shape[-1]]
        mixed = torch.einsum("bim,iom->bom", spectrum, self.weight)
        return torch.fft.irfft(mixed, n=x.shape[-1]) + self.rest(x)


net = nn.Sequential(Spectral(16, 32), nn.GELU(), Spectral(16, 32))
inputs, targets = torch.randn(8, 16, 64), torch.randn(8, 16, 64)
optimizer = torch.optim.LBFGS(net.parameters(), lr=0.01, max_iter=4, history_size=4)


def closure():
    optimizer.zero_grad()
    loss = (net(inputs) - targets).square().mean()
    loss.backward()
    return loss


for _ in range(4):
    optimizer.step(closure)
with torch.no_grad():
    print(net(torch.randn(8, 16, 128)).std().item())
torch.save(net.state_dict(), "net.pt")
