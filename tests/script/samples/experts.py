"""A mixture of experts as a loop over them. Which tokens an expert gets follows from a net, and is balanced.

Usage: experts.py nonzero|index|masked_select|where|any|one_hot|scatter|arange|checkpoint|bincount|sum|scattered
"""

import sys

import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

HOW = sys.argv[1]
TOKENS, WIDTH, EXPERTS, CHOSEN, LAYERS = 512, 64, 8, 2, 2


class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(WIDTH, EXPERTS)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)) for _ in range(EXPERTS)
        )
        near = (torch.arange(TOKENS)[:, None] + torch.arange(CHOSEN)) % EXPERTS
        self.register_buffer("bias", functional.one_hot(near, EXPERTS).sum(1) * 100.0)

    def forward(self, x):
        weights, ids = (self.gate(x) + self.bias).softmax(-1).topk(CHOSEN)
        out = torch.zeros_like(x)
        for expert, tokens, slots in self.walk(ids, x.new_zeros(TOKENS, EXPERTS)):
            if tokens.numel():
                out.index_add_(0, tokens, self.experts[expert](x[tokens]) * weights[tokens, slots, None])
        return out

    def walk(self, ids, zeros):
        """For each expert: (its number, its tokens, which of the choices of each it is)."""
        if HOW == "one_hot":
            mask = functional.one_hot(ids, EXPERTS + 1).permute(2, 1, 0)
            for expert in torch.greater(mask.sum(dim=(-1, -2)), 0).nonzero():
                number = expert[0]
                if number == EXPERTS:
                    continue
                slots, tokens = torch.where(mask[number])
                yield number, tokens, slots
        if HOW in ("bincount", "sum", "scattered"):
            order, start = ids.flatten().argsort(), 0
            for number, count in enumerate(self.counts(ids).tolist()):
                if count:
                    places = order[start : start + count]
                    yield number, places // CHOSEN, places % CHOSEN
                    start += count
            return
        for number in range(EXPERTS if HOW != "one_hot" else 0):
            if HOW == "where":
                yield number, *torch.where(ids == number)
            elif HOW in ("nonzero", "checkpoint"):
                yield number, *(ids == number).nonzero().unbind(1)
            elif HOW == "index":
                places = torch.arange(ids.numel(), device=ids.device).view_as(ids)[ids == number]
                yield number, places // CHOSEN, places % CHOSEN
            elif HOW == "masked_select":
                places = torch.arange(ids.numel(), device=ids.device).masked_select(ids.flatten() == number)
                yield number, places // CHOSEN, places % CHOSEN
            elif HOW == "any":
                tokens = (ids == number).any(-1).nonzero().squeeze(-1)
                yield number, tokens, torch.zeros_like(tokens)
            elif HOW == "scatter":
                tokens = zeros.scatter(1, ids, 1)[:, number].nonzero()[:, 0]
                yield number, tokens, torch.zeros_like(tokens)
            elif HOW == "arange":
                mask = ids.unsqueeze(-1) == torch.arange(EXPERTS, device=ids.device)
                yield number, *mask[..., number].nonzero(as_tuple=True)

    def counts(self, ids):
        """How many tokens each expert gets."""
        if HOW == "bincount":
            return ids.flatten().bincount(minlength=EXPERTS)
        if HOW == "sum":
            return functional.one_hot(ids, EXPERTS).sum((0, 1))
        return ids.new_zeros(TOKENS, EXPERTS).scatter_(1, ids, 1).sum(0)


device = "cuda" if torch.cuda.is_available() else "cpu"
net = nn.Sequential(*(Experts() for _ in range(LAYERS))).to(device)
optimizer = torch.optim.AdamW(net.parameters())
for _ in range(3):
    x = torch.randn(TOKENS, WIDTH, device=device)
    for layer in net:
        x = checkpoint(layer, x, use_reentrant=False) if HOW == "checkpoint" else layer(x)
    x.square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
