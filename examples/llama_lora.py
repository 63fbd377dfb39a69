"""Llama-3.1-8B with LoRA on one card: frozen bf16 weights, and rank-16 matrices beside every linear layer (peft).

memfit predict examples/llama_lora.py:Llama8B --device rtx4090 --micro-batch 2048

Neither weights nor a tokenizer are read: the sizes are those of Llama-3.1-8B. To train it, begin nets() with
AutoModelForCausalLM.from_pretrained(...), and give your own tokens in dataset().
"""

import torch
from language_model import LanguageModel
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, LlamaConfig


class Llama8B(LanguageModel):
    longest, checkpoint = 2048, "all"
    layers: int = 32
    width: int = 4096
    vocabulary: int = 128256
    rank: int = 16

    def nets(self):
        config = LlamaConfig(
            vocab_size=self.vocabulary, hidden_size=self.width, intermediate_size=self.width * 7 // 2,
            num_hidden_layers=self.layers, num_attention_heads=self.width // 128, num_key_value_heads=self.width // 512,
            rope_theta=500000.0, rms_norm_eps=1e-5,
        )  # fmt: skip
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        return {"llama": get_peft_model(model, LoraConfig(r=self.rank, target_modules="all-linear"))}
