"""The same language model on long sequences, which context parallelism divides over devices.

memfit predict examples/long_context.py:LongContext --mesh dp_shard=2,cp=4 --micro-batch 131072 --device h100
"""

import torch
from language_model import LanguageModel
from torch.nn.functional import cross_entropy

import memfit


class LongContext(LanguageModel):
    longest, layers, width, checkpoint, causal_attention = 131072, 16, 2048, "all", True

    def batch(self, shape):
        return self.collate(torch.randint(256, (shape.items, shape.length)).unbind())

    def collate(self, samples):
        tokens = torch.stack(tuple(samples))
        targets = torch.nn.functional.pad(tokens[:, 1:], (0, 1), value=-100)  # shifted before sequences are divided
        return {"tokens": tokens, "targets": targets, "positions": torch.arange(tokens.shape[1]).expand_as(tokens)}

    def context_buffers(self, nets, batch):
        return [(tensor, 1) for tensor in batch.values()]

    def units(self, batch):
        return int((batch["targets"] != -100).sum())

    def loss(self, nets, batch):
        logits = nets["llama"](batch["tokens"], position_ids=batch["positions"], use_cache=False).logits.flatten(0, 1)
        targets = batch["targets"].flatten()
        total = cross_entropy(logits.float(), targets, ignore_index=-100, reduction="sum")
        return memfit.Loss(total, (targets != -100).sum())
