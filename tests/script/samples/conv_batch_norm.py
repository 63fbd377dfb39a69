"""Image classification with batch normalisation, its evaluation inside the loop."""

import torch
from torch import nn

device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(0)
net = nn.Sequential(
    nn.Conv2d(3, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(32, 64, 3, padding=1),
    nn.BatchNorm2d(64), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10),
).to(device)  # fmt: skip
optimizer = torch.optim.SGD(net.parameters(), 0.1, momentum=0.9, nesterov=True, foreach=True)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 4)
for step in range(4):
    images, labels = torch.randn(16, 3, 32, 32).to(device), torch.randint(0, 10, (16,)).to(device)
    net.train()
    loss = nn.functional.cross_entropy(net(images), labels, label_smoothing=0.1)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    scheduler.step()
    if step % 2:
        net.eval()
        with torch.no_grad():
            print(step, loss.item(), net(torch.randn(64, 3, 32, 32).to(device)).argmax(1).float().mean().item())
