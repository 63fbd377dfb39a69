"""A recurrence over time in plain PyTorch: the gradients of slices of one tensor are added up, in place."""

import torch
from torch import nn

torch.manual_seed(0)


class Scan(nn.Module):
    def __init__(self, width: int = 64, states: int = 8) -> None:
        super().__init__()
        self.rates = nn.Parameter(torch.zeros(width, states))
        self.into, self.out = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        decay = torch.exp(-self.into(x).sigmoid()[..., None] * self.rates.exp())
        state, states = torch.zeros_like(decay[:, 0]), []
        for time in range(x.shape[1]):
            state = decay[:, time] * state + x[:, time, :, None]
            states.append(state.sum(-1))
        return self.out(torch.stack(states, 1))


net = Scan()
optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
for _ in range(3):
    loss = net(torch.randn(8, 64, 64)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
