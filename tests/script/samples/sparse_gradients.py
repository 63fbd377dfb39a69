"""Sparse gradients of embeddings, summed over two micro-batches, and a product with a graph's adjacency; one argument:
how the table is made and stepped."""

import sys

import torch
from torch import nn

KIND = sys.argv[1]
ROWS, WIDTH, BATCH = 4000, 48, 96


class Recommender(nn.Module):
    def __init__(self):
        super().__init__()
        if KIND == "bag":
            self.users = nn.EmbeddingBag(ROWS, WIDTH, mode="mean", sparse=True)
        else:
            self.users = nn.Embedding(ROWS, WIDTH, sparse=True, padding_idx=0)
        self.head = nn.Linear(WIDTH, 8)

    def forward(self, ids, graph):
        rows = self.users(ids) if KIND == "bag" else self.users(ids).sum(1)
        if KIND == "bag":
            rows = torch.sparse.mm(graph, rows)
        return self.head(rows)


torch.manual_seed(0)
net = Recommender()
tables, rest = list(net.users.parameters()), list(net.head.parameters())
if KIND == "adagrad":
    sparse = torch.optim.Adagrad(tables, lr=0.1)
elif KIND == "sgd":
    sparse = torch.optim.SGD(tables, lr=0.1)
else:
    sparse = torch.optim.SparseAdam(tables, lr=0.01)
dense = torch.optim.Adam(rest, lr=0.01)
edges = torch.stack([torch.arange(BATCH), torch.arange(BATCH).roll(3)])
graph = torch.sparse_coo_tensor(edges, torch.full((BATCH,), 0.5), (BATCH, BATCH), check_invariants=False)
for _step in range(4):
    for part in range(2):
        ids = torch.randperm(ROWS // 2)[: BATCH * 6].view(BATCH, 6) + part * (ROWS // 2)
        net(ids, graph).square().mean().backward()
    sparse.step()
    dense.step()
    sparse.zero_grad()
    dense.zero_grad()
