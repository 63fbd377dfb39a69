"""Meta-learning by ``torch.func``: a gradient step inside of each task, for all tasks at once."""

import torch
from torch import nn
from torch.func import functional_call, grad, vmap

device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(0)
net = nn.Sequential(nn.Linear(1, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1)).to(device)
optimizer = torch.optim.Adam(net.parameters(), 1e-3)


def error(parameters, x, y):
    return (functional_call(net, parameters, (x,)) - y).square().mean()


def adapted_error(parameters, x, y, x_after, y_after):
    gradients = grad(error)(parameters, x, y)
    adapted = {name: value - 0.1 * gradients[name] for name, value in parameters.items()}
    return error(adapted, x_after, y_after)


for step in range(4):
    x, x_after = torch.randn(16, 20, 1, device=device), torch.randn(16, 20, 1, device=device)
    parameters = dict(net.named_parameters())
    loss = vmap(adapted_error, (None, 0, 0, 0, 0))(parameters, x, x.sin(), x_after, x_after.sin()).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(step, loss.item())
