"""A small language model whose loop keeps the logits through the backward, with accumulation."""

import torch
from torch import nn

device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(0)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(5000, 128)
        layer = nn.TransformerEncoderLayer(128, 4, 512, batch_first=True, dropout=0.0)
        self.blocks = nn.TransformerEncoder(layer, 2)
        self.head = nn.Linear(128, 5000, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids):
        return self.head(self.blocks(self.embed(ids)))


model = Model().to(device)
optimizer = torch.optim.AdamW(model.parameters(), 1e-3, foreach=True)
for step in range(3):
    for _micro in range(2):
        ids = torch.randint(0, 5000, (4, 65)).to(device)
        logits = model(ids[:, :-1])
        loss = nn.functional.cross_entropy(logits.float().flatten(0, 1) * 1.0, ids[:, 1:].flatten())
        (loss / 2).backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    print(step, loss.item())
