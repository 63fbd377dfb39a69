"""A recurrent net on shuffled sequences of varied lengths, padded in each batch: the longest batch makes the peak."""

import torch
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader


def collate(sequences: list[torch.Tensor]) -> torch.Tensor:
    return pad_sequence(sequences, batch_first=True)


torch.manual_seed(1)
made = torch.Generator().manual_seed(0)
data = [torch.randint(1, 200, (int(torch.randint(5, 90, (1,), generator=made)),), generator=made) for _ in range(36)]
net = nn.Sequential(nn.Embedding(200, 64), nn.Dropout(0.1), nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 200))
optimizer = torch.optim.AdamW(net.parameters(), 1e-3)
loader = DataLoader(data, 2, shuffle=True, collate_fn=collate)
for _ in range(2):
    net.train()
    for batch in loader:
        logits = net(batch)[:, :-1]
        nn.functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten(), ignore_index=0).backward()
        optimizer.step()
        optimizer.zero_grad()
    net.eval()
    with torch.no_grad():
        for batch in DataLoader(data, 6, sampler=torch.randperm(12).tolist(), collate_fn=collate):
            net(batch).argmax(-1)
torch.save(net.state_dict(), "net.pt")
