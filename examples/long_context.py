"""A Hugging Face language model on long sequences, which context parallelism divides over devices.

memfit predict examples/long_context.py:LongContext --mesh dp_shard=2,cp=4 --micro-batch 131072 --device h100
"""

from pathlib import Path

import torch
from torch.nn.functional import cross_entropy
from transformers import LlamaConfig, LlamaForCausalLM

import memfit


class LongContext(memfit.Job):
    unit, longest, precision, clip, checkpoint = "tokens", 131072, "bf16", 1.0, "all"
    causal_attention = True
    layers: int = 16
    width: int = 2048

    def nets(self):
        heads = {"num_attention_heads": self.width // 64, "num_key_value_heads": self.width // 256}
        sizes = {"num_hidden_layers": self.layers, "hidden_size": self.width, "intermediate_size": 4 * self.width}
        return {"llama": LlamaForCausalLM(LlamaConfig(vocab_size=256, rope_theta=500000.0, **sizes, **heads))}

    def optimizers(self, nets):
        return {"adamw": torch.optim.AdamW(nets["llama"].parameters(), lr=3e-4)}

    def batch(self, shape):
        return self.collate(list(torch.randint(256, (shape.items, shape.length + 1))))

    def collate(self, samples):
        rows = torch.stack(list(samples))
        positions = torch.arange(rows.shape[1] - 1).expand(len(rows), -1)
        return {"tokens": rows[:, :-1], "targets": rows[:, 1:], "positions": positions}

    def context_buffers(self, nets, batch):
        return [(tensor, 1) for tensor in batch.values()]

    def loss(self, nets, batch):
        logits = nets["llama"](batch["tokens"], position_ids=batch["positions"], use_cache=False).logits
        targets = batch["targets"].flatten()
        return memfit.Loss(cross_entropy(logits.flatten(0, 1).float(), targets, reduction="sum"), len(targets))

    def dataset(self):
        files = sorted(Path(torch.__file__).parent.glob("*.py"))
        text = torch.frombuffer(bytearray(b"".join(path.read_bytes() for path in files)), dtype=torch.uint8)
        return text.long().unfold(0, self.longest + 1, self.longest)

    def lengths(self):
        return [self.longest] * len(self.dataset())
