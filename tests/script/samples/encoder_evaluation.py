"""An encoder evaluated on longer sequences, with a mask and without: its layers take fused kernels then."""

import torch
from torch import nn

device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(0)
layers = [nn.TransformerEncoderLayer(128, 4, 256, batch_first=True, norm_first=first) for first in (True, False)]
net = nn.ModuleDict({"encoders": nn.ModuleList(layers), "out": nn.Linear(128, 30)}).to(device)
optimizer = torch.optim.SGD(net.parameters(), 1e-3, foreach=False)


def score(x, mask=None):
    x = x.transpose(1, 2)
    for layer in net["encoders"]:
        x = layer(x, src_key_padding_mask=mask)
    return net["out"](x)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = net

    def forward(self, x, mask=None):
        return score(x, mask)


whole = Net()
for step in range(3):
    whole.train()
    loss = whole(torch.randn(2, 128, 40).to(device)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    whole.eval()
    with torch.no_grad():
        for length in (120, 150):
            x = torch.randn(4, 128, length).to(device)
            mask = torch.arange(length, device=device)[None] >= torch.full((4, 1), 100, device=device)
            print(step, whole(x, mask).argmax(-1).float().mean().item())
        print(step, whole(x).sum().item())
