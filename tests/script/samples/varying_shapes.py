"""Batches of different lengths, padded; lengths and masks decide shapes."""

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(0)


class Words(Dataset):
    def __len__(self):
        return 24

    def __getitem__(self, i):
        return torch.arange(1, 20 + 3 * i)


def collate(items):
    lengths = torch.tensor([len(item) for item in items])
    return nn.utils.rnn.pad_sequence(items, batch_first=True), lengths


embed, net = nn.Embedding(200, 128).to(device), nn.Linear(128, 200).to(device)
optimizer = torch.optim.Adam([*embed.parameters(), *net.parameters()], 1e-3, foreach=True)
for _epoch in range(1):
    for ids, lengths in DataLoader(Words(), batch_size=6, collate_fn=collate):
        ids, lengths = ids.to(device), lengths.to(device)
        mask = torch.arange(int(lengths.max()), device=device)[None] < lengths[:, None]
        logits = net(embed(ids)[mask])
        loss = nn.functional.cross_entropy(logits, ids[mask])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(tuple(logits.shape), loss.item())
