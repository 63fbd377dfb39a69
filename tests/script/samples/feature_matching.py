"""A vocoder's generator learns from the features of several discriminators, which the training function keeps."""

import itertools

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.parametrizations import weight_norm
from torch.utils.data import DataLoader


class Generator(nn.Module):
    def __init__(self):
        super().__init__()
        widths = (32, 16, 8)
        self.first = weight_norm(nn.Conv1d(20, widths[0], 7, padding=3))
        self.ups = nn.ModuleList(
            [weight_norm(nn.ConvTranspose1d(a, b, 16, 8, 4)) for a, b in itertools.pairwise(widths)]
        )
        self.blocks = nn.ModuleList([weight_norm(nn.Conv1d(b, b, 3, padding=1)) for b in widths[1:]])
        self.last = weight_norm(nn.Conv1d(widths[-1], 1, 7, padding=3))

    def forward(self, mel):
        x = self.first(mel)
        for up, block in zip(self.ups, self.blocks, strict=True):
            x = up(F.leaky_relu(x, 0.1))
            x = x + block(F.leaky_relu(x, 0.1))
        return torch.tanh(self.last(F.leaky_relu(x)))


class PeriodDiscriminator(nn.Module):
    def __init__(self, period):
        super().__init__()
        self.period = period
        widths = (1, 8, 16, 32)
        self.convs = nn.ModuleList(
            [weight_norm(nn.Conv2d(a, b, (5, 1), (3, 1), (2, 0))) for a, b in itertools.pairwise(widths)]
        )
        self.last = weight_norm(nn.Conv2d(widths[-1], 1, (3, 1), padding=(1, 0)))

    def forward(self, wave):
        x = F.pad(wave, (0, -wave.shape[-1] % self.period), "reflect")
        x = x.view(*x.shape[:2], -1, self.period)
        features = []
        for conv in self.convs:
            x = F.leaky_relu(conv(x), 0.1)
            features.append(x)
        x = self.last(x)
        features.append(x)
        return x.flatten(1), features


class Discriminators(nn.Module):
    def __init__(self):
        super().__init__()
        self.parts = nn.ModuleList([PeriodDiscriminator(period) for period in (2, 3, 5)])

    def forward(self, real, made):
        reals, mades, real_features, made_features = [], [], [], []
        for part in self.parts:
            score, features = part(real)
            reals.append(score)
            real_features.append(features)
            score, features = part(made)
            mades.append(score)
            made_features.append(features)
        return reals, mades, real_features, made_features


def train(device):
    generator, discriminators = Generator().to(device), Discriminators().to(device)
    of_generator = torch.optim.AdamW(generator.parameters(), 2e-4)
    of_discriminators = torch.optim.AdamW(discriminators.parameters(), 2e-4)
    clips = [(torch.randn(20, 64), torch.randn(1, 4096)) for _ in range(24)]
    for mel, wave in DataLoader(clips, batch_size=4):
        mel, wave = mel.to(device), wave.to(device)
        made = generator(mel)
        of_discriminators.zero_grad()
        reals, mades, _, _ = discriminators(wave, made.detach())
        loss = sum(((1 - a) ** 2).mean() + (b**2).mean() for a, b in zip(reals, mades, strict=True))
        loss.backward()
        of_discriminators.step()
        of_generator.zero_grad()
        _, mades, real_features, made_features = discriminators(wave, made)
        loss = 45 * F.l1_loss(wave, made) + sum(((1 - score) ** 2).mean() for score in mades)
        for reals, fakes in zip(real_features, made_features, strict=True):
            for a, b in zip(reals, fakes, strict=True):
                loss += (a - b).abs().mean()
        loss.backward()
        of_generator.step()


if __name__ == "__main__":
    train("cuda" if torch.cuda.is_available() else "cpu")
