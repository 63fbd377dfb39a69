"""Top-k accuracy of classes, with the intermediate tensors that upstream's metric has: they are alive beside the graph.

torchmetrics 1.x, ``MulticlassAccuracy(top_k=k, average="micro", ignore_index=i)``: classes are compared one-hot.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F


def top_k_accuracy(logits: Tensor, targets: Tensor, k: int, ignored: int) -> Tensor:
    """The part of the targets that are among the k likeliest classes.

    Args:
        logits: (b, classes, t).
        targets: (b, t) classes; those that are ``ignored`` do not count.
    """
    marked = torch.zeros_like(logits, dtype=torch.int32)
    marked.scatter_(1, logits.topk(k, dim=1).indices, 1)
    marked = torch.movedim(marked, 1, -1)
    likeliest = torch.topk(logits, k=k, dim=1).indices
    among = torch.any(likeliest == targets.unsqueeze(1), dim=1)
    given = torch.where(among, targets, likeliest[:, 0])
    guessed = torch.zeros_like(marked, dtype=torch.int32).scatter_(-1, given.unsqueeze(-1), 1)
    wanted = F.one_hot(targets, logits.shape[1])
    wanted = wanted.masked_fill_((targets == ignored).unsqueeze(-1), -1)
    right = ((wanted == guessed) & (wanted == 1)).sum([0, 1])
    missed = ((wanted != guessed) & (wanted == 1)).sum([0, 1])
    wrong = ((wanted != guessed) & (wanted == 0)).sum([0, 1])
    spared = ((wanted == guessed) & (wanted == 0)).sum([0, 1])
    right, missed = torch.stack([right, wrong, spared, missed]).sum(1)[[0, 3]].unbind()
    return right / (right + missed)
