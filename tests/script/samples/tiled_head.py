"""A vocabulary's log-probabilities in tiles: products are written into one buffer, which is wider than they are."""

import sys

import torch
from torch import nn

TOKENS, WIDTH, WORDS, TILE = 512, 64, 1000, 4096
DEVICE = "cuda" if "cuda" in sys.argv else "cpu"


class TiledLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, weight, targets):
        buffer = torch.empty(len(hidden), TILE, device=hidden.device, dtype=hidden.dtype)
        logits = torch.mm(hidden, weight.t(), out=buffer[:, : len(weight)])
        normalizer = torch.logsumexp(logits, 1)
        ctx.save_for_backward(hidden, weight, targets, normalizer)
        return normalizer - logits.gather(1, targets[:, None])[:, 0]

    @staticmethod
    def backward(ctx, gradient):
        hidden, weight, targets, normalizer = ctx.saved_tensors
        buffer = torch.empty(len(hidden), TILE, device=hidden.device, dtype=hidden.dtype)
        logits = torch.mm(hidden, weight.t(), out=buffer[:, : len(weight)])
        torch.sub(logits, normalizer[:, None], out=logits).exp_()
        logits.scatter_add_(1, targets[:, None], -torch.ones_like(targets[:, None], dtype=logits.dtype))
        logits.mul_(gradient[:, None])
        of_hidden = torch.zeros(hidden.shape, device=hidden.device)
        of_weight = torch.zeros(weight.shape, device=weight.device)
        for total, left, right in ((of_hidden, logits, weight), (of_weight, logits.t(), hidden)):
            if DEVICE == "cuda":
                torch.addmm(total, left, right, out_dtype=torch.float32, out=total)
            else:
                total.addmm_(left, right)
        return of_hidden.to(hidden.dtype), of_weight.to(weight.dtype), None


dtype = torch.bfloat16 if DEVICE == "cuda" else torch.float32
net = nn.Sequential(nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WIDTH), nn.GELU()).to(DEVICE, dtype)
head = nn.Linear(WIDTH, WORDS, bias=False).to(DEVICE, dtype)
optimizer = torch.optim.AdamW([*net.parameters(), *head.parameters()])
for _ in range(3):
    tokens = torch.randint(0, WORDS, (TOKENS + 1,)).to(DEVICE)
    loss = TiledLoss.apply(net(tokens[:-1]), head.weight, tokens[1:]).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
