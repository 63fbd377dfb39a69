"""A training script as people write them: GPT-2 on random tokens, bf16 autocast, gradient accumulation, AdamW.

memfit trace --device rtx4090 -- python examples/scripts/gpt2.py --batch-size 12
"""

import argparse

import torch
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset
from transformers import GPT2Config, GPT2LMHeadModel

parser = argparse.ArgumentParser()
parser.add_argument("--batch-size", type=int, default=12)
parser.add_argument("--steps", type=int, default=1000)
args = parser.parse_args()

model = GPT2LMHeadModel(GPT2Config()).cuda()
optimizer = torch.optim.AdamW(model.parameters(), lr=6e-4)
data = DataLoader(
    TensorDataset(torch.randint(50257, (args.steps * 4, 1024))), batch_size=args.batch_size, drop_last=True
)

for step, (tokens,) in enumerate(data):
    tokens = tokens.cuda()
    with torch.autocast("cuda", dtype=torch.bfloat16):
        logits = model(tokens).logits
        loss = cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
    (loss / 4).backward()
    if (step + 1) % 4 == 0:
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

torch.save(model.state_dict(), "gpt2.pt")
