"""Llama 3.1 from its config, on any mesh: the sizes of 8 B, 70 B and 405 B, without weights.

memfit predict bench/llama3_job.py:Llama3 --set size=405b --set checkpoint=all --micro-batch 8192
    --mesh dp_shard=512,tp=8 --device h100
memfit plan bench/llama3_job.py:Llama3 --global-batch 1048576 --devices 64 --nodes 8 --device h100

initialise() gives one module after the other its first values, so that no rank holds the net whole. To go on with
trained weights, read them there. A data set is yours to add.
"""

import torch
from torch.nn.functional import cross_entropy
from transformers import LlamaConfig, LlamaForCausalLM

import memfit

SIZES = {
    "8b": {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32},
    "70b": {"hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80, "num_attention_heads": 64},
    "405b": {"hidden_size": 16384, "intermediate_size": 53248, "num_hidden_layers": 126, "num_attention_heads": 128},
}


class Llama3(memfit.Job):
    unit, longest, precision, clip = "tokens", 8192, "bf16", 1.0
    size: str = "8b"

    def nets(self):
        shared = {"vocab_size": 128256, "num_key_value_heads": 8, "max_position_embeddings": 131072}
        config = LlamaConfig(**SIZES[self.size], **shared, tie_word_embeddings=False, rms_norm_eps=1e-5)
        return {"llama": LlamaForCausalLM(config)}

    def initialise(self, net, module):
        net._init_weights(module)

    def optimizers(self, nets):
        return {"adamw": torch.optim.AdamW(nets["llama"].parameters(), lr=3e-4)}

    def batch(self, shape):
        return torch.randint(128256, (shape.items, shape.length))

    def loss(self, nets, tokens):
        logits, wanted = nets["llama"](tokens, use_cache=False).logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten()
        return memfit.Loss(cross_entropy(logits.float(), wanted, reduction="sum"), len(wanted))
