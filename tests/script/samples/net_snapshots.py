"""A copy of the net after each epoch, while its gradients are there: an ensemble answers in the end."""

import copy

import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

device = "cuda" if torch.cuda.is_available() else "cpu"
net = nn.Sequential(nn.Conv2d(3, 16, 3, 2), nn.BatchNorm2d(16), nn.ReLU(), nn.Flatten(), nn.Linear(784, 64)).to(device)
optimizer = torch.optim.SGD(net.parameters(), 0.1, momentum=0.9)
average, snapshots = AveragedModel(net, use_buffers=True), []
for _ in range(3):
    net.train()
    for _ in range(2):
        loss = net(torch.randn(4, 3, 16, 16).to(device)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    average.update_parameters(net)
    snapshots.append(copy.deepcopy(net).eval())
with torch.no_grad():
    image = torch.randn(4, 3, 16, 16).to(device)
    torch.stack([snapshot(image).softmax(-1) for snapshot in [*snapshots, average]]).mean(0)
torch.save(average.module.state_dict(), "average.pt")
