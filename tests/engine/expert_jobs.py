"""Mixtures of experts that transformers has plans for, and nets whose experts cannot be divided."""

import torch
from peft import LoraConfig, get_peft_model
from transformers import (
    GptOssConfig,
    GptOssForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Qwen2MoeConfig,
    Qwen2MoeForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from tests.engine.tensor_jobs import HEADS, SIZES, Words

SMALL = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}


class Mixture(Words):
    """A Mixtral with four experts in each layer."""

    experts: int = 4

    def nets(self):
        torch.manual_seed(2)
        return {"net": MixtralForCausalLM(MixtralConfig(**SIZES, **HEADS, num_local_experts=self.experts))}


class DrawnMixture(Mixture):
    """A Mixtral whose modules are given their values one by one."""

    def nets(self):
        return {"net": MixtralForCausalLM(MixtralConfig(**SIZES, **HEADS, num_local_experts=self.experts))}

    def initialise(self, net, module):
        net._init_weights(module)


class EvenMixture(Mixture):
    """A Mixtral whose routers send each token to two experts by its place, one of each half of them."""

    def nets(self):
        nets = super().nets()
        for layer in nets["net"].model.layers:
            layer.mlp.gate.register_forward_hook(evenly)
        return nets


def evenly(gate, args, routed):
    logits, scores, index = routed
    first = torch.arange(len(index), device=index.device) % gate.num_experts
    second = (first + gate.num_experts // 2) % gate.num_experts
    return logits, scores, torch.stack([first, second], dim=1)


class SharedExpert(Words):
    """A Qwen2-MoE, whose layers have an expert that all tokens take too; the first has no mixture."""

    def nets(self):
        torch.manual_seed(2)
        config = Qwen2MoeConfig(
            **SIZES, **HEADS, **SMALL, shared_expert_intermediate_size=40, mlp_only_layers=[0], norm_topk_prob=True
        )
        return {"net": Qwen2MoeForCausalLM(config)}


class NormedMixture(Words):
    """A Qwen3-MoE: norms of single heads."""

    def nets(self):
        torch.manual_seed(2)
        return {"net": Qwen3MoeForCausalLM(Qwen3MoeConfig(**SIZES, **HEADS, **SMALL, head_dim=8, norm_topk_prob=True))}


class Biased(Words):
    """A GPT-OSS: experts with biases, in the other order of dimensions."""

    def nets(self):
        torch.manual_seed(2)
        config = GptOssConfig(**SIZES, **HEADS, num_local_experts=4, num_experts_per_tok=2, head_dim=8)
        config.layer_types = ["full_attention"] * 2
        return {"net": GptOssForCausalLM(config)}


class AdaptedMixture(Mixture):
    """A Mixtral with adapters of its attention; its experts are frozen."""

    def nets(self):
        adapters = LoraConfig(r=4, target_modules=["q_proj", "v_proj", "o_proj"], init_lora_weights=False)
        return {"net": get_peft_model(super().nets()["net"], adapters)}


class Three(Mixture):
    experts: int = 3


CARRIED = {
    "mixture": Mixture, "shared expert": SharedExpert, "normed mixture": NormedMixture, "biased experts": Biased,
    "adapted mixture": AdaptedMixture,
}  # fmt: skip
CUT = {name: kind for name, kind in CARRIED.items() if kind is not Biased}
"""Those whose experts transformers has a plan to cut on ``tp``."""
REFUSED = {
    Words: "net 'net' (LlamaForCausalLM) on ep=2: no net has a mixture of experts",
    Three: "module net.model.layers.0.mlp.experts on ep=2: its 3 experts do not divide by 2; write another ep",
}
