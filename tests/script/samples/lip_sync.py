"""A lip-sync trainer whose loss asks a frozen judge. It saves in the midst of an epoch, right before a validation."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset

FRAMES, HEIGHT, WIDTH = 5, 48, 64
device = "cuda" if torch.cuda.is_available() else "cpu"


class Clips(Dataset):
    def __init__(self, count):
        self.count = count

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        frames = torch.rand(2, FRAMES, 3, HEIGHT, WIDTH)
        return {"frames": frames[0], "other": frames[1], "mel": torch.randn(FRAMES, 1, 80, 16)}


def block(channels, out, stride=1):
    return nn.Sequential(nn.Conv2d(channels, out, 3, stride, 1), nn.BatchNorm2d(out), nn.ReLU())


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.down = nn.ModuleList([block(6, 16), block(16, 32, 2)])
        self.audio = nn.Sequential(block(1, 16, 2), block(16, 32, 2), nn.AdaptiveAvgPool2d(1))
        self.up = nn.Sequential(nn.ConvTranspose2d(64, 16, 2, 2), nn.BatchNorm2d(16), nn.ReLU())
        self.last = nn.Conv2d(32, 3, 1)

    def forward(self, mel, frames):
        clips = mel.shape[0]
        large = self.down[0](frames.transpose(0, 1).flatten(0, 1))
        small = self.down[1](large)
        audio = self.audio(mel.transpose(0, 1).flatten(0, 1)).expand(-1, -1, *small.shape[2:])
        made = torch.cat([self.up(torch.cat([small, audio], 1)), large], 1)
        return torch.stack(torch.sigmoid(self.last(made)).split(clips))


class Judge(nn.Module):
    def __init__(self):
        super().__init__()
        self.faces = nn.Sequential(block(3 * FRAMES, 16), block(16, 32, 2), nn.AdaptiveAvgPool2d(1), nn.Flatten())
        self.audio = nn.Sequential(block(1, 16), block(16, 32, 2), nn.AdaptiveAvgPool2d(1), nn.Flatten())

    def forward(self, mel, frames):
        return F.cosine_similarity(self.audio(mel), self.faces(frames.transpose(0, 1).flatten(1, 2)))


def prepared(batch):
    half = batch["frames"] * torch.tensor([1.0] * (HEIGHT // 2) + [0.0] * (HEIGHT // 2)).view(-1, 1)
    frames = torch.cat([half, batch["other"]], 2).to(device)
    return batch["mel"].to(device), frames, batch["frames"].to(device)


def sync_loss(judge, mel, made):
    likeness = judge(mel[:, 0], made).clamp(0, 1)
    return F.binary_cross_entropy(likeness, torch.ones_like(likeness))


def validate(net, judge, loader):
    net.eval()
    losses = []
    for batch in loader:
        mel, frames, truth = prepared(batch)
        with torch.no_grad():
            made = net(mel, frames)
            sync, distance = sync_loss(judge, mel, made), F.l1_loss(made, truth.transpose(0, 1))
            losses.append((sync.item(), distance.item()))
    return sum(first for first, _ in losses) / len(losses)


def train():
    net, judge = Net().to(device), Judge().to(device).requires_grad_(False)
    optimizer = torch.optim.Adam(net.parameters(), 1e-4)
    loader, held_out = DataLoader(Clips(16), 4, shuffle=True), DataLoader(Clips(8), 4)
    step = 0
    while step < 8:
        for batch in loader:
            net.train()
            optimizer.zero_grad()
            mel, frames, truth = prepared(batch)
            made = net(mel, frames)
            sync = sync_loss(judge, mel, made)
            loss = F.l1_loss(made, truth.transpose(0, 1)) + 0.03 * sync
            loss.backward()
            optimizer.step()
            step += 1
            if step % 4 == 0:
                torch.save({"net": net.state_dict(), "optimizer": optimizer.state_dict()}, "step.pth")
                print(step, validate(net, judge, held_out))


if __name__ == "__main__":
    train()
