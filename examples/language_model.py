"""A Hugging Face language model, trained from scratch on the bytes of PyTorch's own sources.

memfit predict examples/language_model.py:LanguageModel --device rtx4090 --micro-batch 16384
"""

from pathlib import Path

import torch
from torch.nn.functional import cross_entropy
from transformers import LlamaConfig, LlamaForCausalLM

import memfit


class LanguageModel(memfit.Job):
    unit, longest, precision, clip = "tokens", 1024, "bf16", 1.0
    layers: int = 12
    width: int = 768

    def nets(self):
        sizes = {"num_hidden_layers": self.layers, "hidden_size": self.width, "num_attention_heads": self.width // 64}
        return {"llama": LlamaForCausalLM(LlamaConfig(vocab_size=256, intermediate_size=4 * self.width, **sizes))}

    def optimizers(self, nets):
        return {"adamw": torch.optim.AdamW([p for p in nets["llama"].parameters() if p.requires_grad], lr=3e-4)}

    def batch(self, shape):
        return torch.randint(256, (shape.items, shape.length))

    def loss(self, nets, tokens):
        logits, wanted = nets["llama"](tokens, use_cache=False).logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten()
        return memfit.Loss(cross_entropy(logits.float(), wanted, reduction="sum"), len(wanted))

    def dataset(self):
        text = b"".join(path.read_bytes() for path in sorted(Path(torch.__file__).parent.glob("*.py")))
        return torch.frombuffer(bytearray(text), dtype=torch.uint8).long().unfold(0, self.longest, self.longest)

    def lengths(self):
        return [self.longest] * len(self.dataset())
