"""Nets whose layers are cut: two that transformers plans, one that cuts itself, and those that cannot be cut."""

from types import SimpleNamespace
from typing import ClassVar

import torch
from diffusers.models.attention import BasicTransformerBlock
from peft import LoraConfig, get_peft_model, inject_adapter_in_model
from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from transformers import (
    GemmaConfig,
    GemmaForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MambaConfig,
    MambaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
)

from memfit.job import Job, Loss

SIZES = {"vocab_size": 32, "hidden_size": 32, "intermediate_size": 80, "num_hidden_layers": 2}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}


def words(sizes):
    tokens = torch.randint(32, (sum(sizes), 6), generator=torch.Generator().manual_seed(4))
    return list(tokens.split(sizes))


class Words(Job):
    """A Llama, whose embedding and head are separate, or one parameter."""

    clip: float | None = 0.5
    ema: float | None = 0.9
    tied: bool = False

    def nets(self):
        torch.manual_seed(2)
        return {"net": LlamaForCausalLM(LlamaConfig(**SIZES, **HEADS, tie_word_embeddings=self.tied))}

    def optimizers(self, nets):
        return {"net": torch.optim.SGD(nets["net"].parameters(), lr=0.1, momentum=0.9)}

    def dataset(self):
        return [row for part in words([40]) for row in part]

    def batch(self, shape):
        return torch.arange(shape.items * 6).view(shape.items, 6) % 32

    def loss(self, nets, batch):
        logits = nets["net"](batch, use_cache=False).logits[:, :-1].flatten(0, 1)
        return Loss(nn.functional.cross_entropy(logits, batch[:, 1:].flatten(), reduction="sum"), 5 * len(batch))


class Tied(Words):
    tied: bool = True


class Own(Words):
    """A net of its own, which its job cuts."""

    between: ClassVar = nn.Tanh

    def nets(self):
        torch.manual_seed(3)
        layers = [nn.Embedding(32, 12), nn.Linear(12, 20), self.between(), nn.Linear(20, 12), nn.LayerNorm(12)]
        return {"net": nn.Sequential(*layers, nn.Linear(12, 32))}

    def loss(self, nets, batch):
        logits = nets["net"](batch)[:, :-1].flatten(0, 1)
        return Loss(nn.functional.cross_entropy(logits, batch[:, 1:].flatten(), reduction="sum"), 5 * len(batch))

    def parallelize(self, nets, mesh):
        parallelize_module(nets["net"], mesh, {"1": ColwiseParallel(), "3": RowwiseParallel()})


class Learned(Own):
    """The activation between two layers that are cut has a parameter, and sees this rank's part."""

    between: ClassVar = nn.PReLU


class LearnedTwice(Own):
    """The same activation between two pairs of layers."""

    def nets(self):
        torch.manual_seed(3)
        shared = nn.PReLU()
        pairs = [[nn.Linear(12, 20), shared, nn.Linear(20, 12)] for _ in range(2)]
        return {"net": nn.Sequential(nn.Embedding(32, 12), *pairs[0], nn.LayerNorm(12), *pairs[1], nn.Linear(12, 32))}

    def parallelize(self, nets, mesh):
        pairs = {"1": ColwiseParallel(), "3": RowwiseParallel(), "5": ColwiseParallel(), "7": RowwiseParallel()}
        parallelize_module(nets["net"], mesh, pairs)


class ScaledLogits(Words):
    """Logits are multiplied by a single number that is trained."""

    class Net(nn.Module):
        def __init__(self, inner):
            super().__init__()
            self.inner, self.scale = inner, nn.Parameter(torch.tensor(0.3))

        def forward(self, tokens, use_cache=False):
            return SimpleNamespace(logits=self.inner(tokens, use_cache=use_cache).logits * self.scale.exp())

    def nets(self):
        return {"net": self.Net(super().nets()["net"])}


class Unplanned(Words):
    def nets(self):
        return {"net": MambaForCausalLM(MambaConfig(vocab_size=32, hidden_size=16, num_hidden_layers=1, state_size=4))}


class Adapted(Words):
    """Adapters, which wrap the modules that the plan names."""

    def nets(self):
        return {"net": get_peft_model(super().nets()["net"], LoraConfig(target_modules=["q_proj"]))}


class FullyAdapted(Words):
    """Adapters of all linear layers, and a head that is trained whole."""

    settings_of_adapters: ClassVar = {
        "target_modules": "all-linear",
        "modules_to_save": ["lm_head"],
        "init_lora_weights": False,
    }

    def nets(self):
        net = super().nets()["net"]
        torch.manual_seed(5)
        return {"net": get_peft_model(net, LoraConfig(r=4, **self.settings_of_adapters))}


class Magnitudes(FullyAdapted):
    """Adapters with magnitudes (DoRA)."""

    settings_of_adapters: ClassVar = {"target_modules": ["q_proj"], "use_dora": True}


class AdaptedEmbedding(FullyAdapted):
    settings_of_adapters: ClassVar = {"target_modules": ["embed_tokens"]}


class Denoiser(nn.Module):
    """diffusers' transformer block between an embedding and a head."""

    def __init__(self):
        super().__init__()
        self.embedding, self.head = nn.Embedding(32, 32), nn.Linear(32, 32)
        self.block = BasicTransformerBlock(32, 4, 8, activation_fn="geglu")

    def forward(self, tokens, use_cache=False):
        return SimpleNamespace(logits=self.head(self.block(self.embedding(tokens))))


class AdaptedBlock(Words):
    """Adapters within the attention and feed-forward of diffusers."""

    def nets(self):
        torch.manual_seed(5)
        targets = ["to_q", "to_k", "to_v", "to_out.0", "net.0.proj", "net.2"]
        return {"net": inject_adapter_in_model(LoraConfig(target_modules=targets, init_lora_weights=False), Denoiser())}


class Beside(Words):
    """A Llama within a net that has attention of its own."""

    def nets(self):
        torch.manual_seed(5)
        net = Denoiser()
        net.embedding = super().nets()["net"]
        return {"net": net}

    def loss(self, nets, batch):
        net = nets["net"]
        given = net.embedding(batch, use_cache=False).logits
        logits = net.head(net.block(given))[:, :-1].flatten(0, 1)
        return Loss(nn.functional.cross_entropy(logits, batch[:, 1:].flatten(), reduction="sum"), 5 * len(batch))


class Odd(Words):
    def nets(self):
        return {"net": LlamaForCausalLM(LlamaConfig(**SIZES, num_attention_heads=4, num_key_value_heads=1))}


class Normed(Words):
    """Norms of single heads."""

    def nets(self):
        torch.manual_seed(2)
        return {"net": Qwen3ForCausalLM(Qwen3Config(**SIZES, **HEADS, head_dim=8))}


class Scaled(Words):
    """An embedding with a buffer."""

    def nets(self):
        torch.manual_seed(2)
        return {"net": GemmaForCausalLM(GemmaConfig(**SIZES, **HEADS, head_dim=8, tie_word_embeddings=self.tied))}


class ScaledTied(Scaled):
    """The embedding stays whole."""

    tied: bool = True


class Experts(Words):
    """Mixtures of experts."""

    def nets(self):
        return {"net": MixtralForCausalLM(MixtralConfig(**SIZES, **HEADS, num_local_experts=4))}


class Looped(Words):
    """Experts that run one after the other."""

    def nets(self):
        config = MixtralConfig(**SIZES, **HEADS, num_local_experts=4)
        config._experts_implementation = "eager"
        return {"net": MixtralForCausalLM(config)}


class Narrow(Words):
    """Experts whose width does not divide."""

    width: int = 81

    def nets(self):
        sizes = {**SIZES, "intermediate_size": self.width}
        return {"net": MixtralForCausalLM(MixtralConfig(**sizes, **HEADS, num_local_experts=4))}


class Unaligned(Narrow):
    """Experts whose width divides, but not into rows that grouped products take."""

    width: int = 84


class Idle(Own):
    def parallelize(self, nets, mesh):
        pass


class LinearAttention(Words):
    """Layers that read the weight of the convolution in them, and do not call it."""

    def nets(self):
        torch.manual_seed(5)
        heads = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "head_dim": 8}
        experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
        config = Qwen3NextConfig(
            **SIZES, **HEADS, **heads, **experts, shared_expert_intermediate_size=16, linear_key_head_dim=8,
            linear_value_head_dim=8, layer_types=["linear_attention", "full_attention"],
        )  # fmt: skip
        return {"net": Qwen3NextForCausalLM(config)}


CARRIED = {
    "llama": Words, "tied llama": Tied, "own": Own, "norms of heads": Normed, "scaled embedding": Scaled,
    "scaled and tied embedding": ScaledTied, "adapters": FullyAdapted, "adapters in diffusers": AdaptedBlock,
    "llama in another net": Beside, "linear attention": LinearAttention,
    "learned activation": Learned, "activation that is learned twice": LearnedTwice,
    "scaled logits": ScaledLogits,
}  # fmt: skip
REFUSED = {
    Unplanned: "MambaForCausalLM, and no two linear layers of a forward can be cut together",
    Magnitudes: "q_proj on tp=2: its adapter Linear has lora_magnitude_vector, which is not carried",
    AdaptedEmbedding: "embed_tokens on tp=2: its adapter Embedding has lora_embedding_A, which is not carried",
    Odd: "num_key_value_heads = 1 does not divide",
    Looped: "net.model.layers.0.mlp.experts on tp=2: its experts run by 'eager', whose gates ranks cannot exchange",
    Narrow: "net.model.layers.0.mlp.experts on tp=2: 162 of its gate_up_proj does not divide by 4; write another tp",
    Unaligned: "a rank's rows of its down_proj have 168 bytes, and grouped products take multiples of 16",
    Idle: "Idle.parallelize() on tp=2: it cut no parameter of net 'net'",
}


class Other(Words):
    """The same nets with other weights."""

    def nets(self):
        nets = super().nets()
        with torch.no_grad():
            for parameter in nets["net"].parameters():
                parameter.mul_(1.5)
        return nets


class Drawn(Words):
    """Nets whose modules are given their values one by one; those of their constructor are not random."""

    def nets(self):
        return {"net": LlamaForCausalLM(LlamaConfig(**SIZES, **HEADS, tie_word_embeddings=self.tied))}

    def initialise(self, net, module):
        net._init_weights(module)


class DrawnTied(Drawn):
    tied: bool = True
