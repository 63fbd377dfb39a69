"""Nets whose sequences are divided: a Llama by transformers, an encoder without causal attention, and a net whose
buffers have the sequence; and jobs whose sequences cannot be divided."""

import os
import signal
from pathlib import Path

import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional as F
from torch.nn.functional import cross_entropy, mse_loss
from transformers import LlamaConfig, LlamaForCausalLM

from memfit.job import Job, Loss
from tests.engine.expert_jobs import Mixture, NormedMixture, SharedExpert, evenly
from tests.engine.tensor_jobs import HEADS, SIZES, FullyAdapted

LENGTH = 16


def sequences(sizes):
    """Micro-batches of so many rows: tokens, targets that are shifted already, of which some count, and positions."""
    tokens = torch.randint(32, (sum(sizes), LENGTH + 1), generator=torch.Generator().manual_seed(4))
    targets = tokens[:, 1:].clone()
    for row, target in enumerate(targets):
        target[: 3 * row % LENGTH] = -100
    positions = torch.arange(LENGTH).expand(sum(sizes), -1)
    parts = zip(tokens[:, :-1].split(sizes), targets.split(sizes), positions.split(sizes), strict=True)
    return [dict(zip(("tokens", "targets", "positions"), part, strict=True)) for part in parts]


class Divided(Job):
    """A Llama with fewer heads of keys than of queries; clipped, averaged."""

    clip: float | None = 0.5
    ema: float | None = 0.9
    causal_attention = True

    def nets(self):
        torch.manual_seed(2)
        return {"net": LlamaForCausalLM(LlamaConfig(**SIZES, **HEADS))}

    def optimizers(self, nets):
        return {"net": torch.optim.SGD(nets["net"].parameters(), lr=0.1, momentum=0.9)}

    def dataset(self):
        return [{key: value[0] for key, value in part.items()} for part in sequences([1] * 40)]

    def batch(self, shape):
        (part,) = sequences([shape.items])
        return part

    def context_buffers(self, nets, batch):
        return [(tensor, 1) for tensor in batch.values()]

    def loss(self, nets, batch):
        logits = self.logits(nets["net"], batch).flatten(0, 1)
        targets = batch["targets"].flatten()
        total = cross_entropy(logits, targets, ignore_index=-100, reduction="sum")
        return Loss(total, (targets != -100).sum())

    def logits(self, net, batch):
        return net(batch["tokens"], position_ids=batch["positions"], use_cache=False).logits


class Lost(Divided):
    """Its second rank is killed once, in the first attention of a later forward: the first one waits in a ring."""

    marker: str = ""

    def nets(self):
        nets = super().nets()
        nets["net"].model.layers[0].self_attn.q_proj.register_forward_pre_hook(lambda *call: self.count())
        return nets

    def count(self):
        if self.marker and os.environ.get("RANK") == "1":
            left = int(Path(self.marker).read_text())
            Path(self.marker).write_text(str(left - 1))
            if left == 0:
                os.kill(os.getpid(), signal.SIGKILL)


class Adapted(Divided):
    """Adapters of all linear layers, and a head that is trained whole."""

    def nets(self):
        net = super().nets()["net"]
        torch.manual_seed(5)
        return {"net": get_peft_model(net, LoraConfig(r=4, **FullyAdapted.settings_of_adapters))}


class Known(Divided):
    """Its units are known before the forward, of whole sequences."""

    def units(self, batch):
        return int((batch["targets"] != -100).sum())


class WholeAttention(Divided):
    """Its feed-forwards alone are cut on ``tp``: what follows attention is whole on every rank."""

    def parallelize(self, nets, mesh):
        styles = {"gate_proj": ColwiseParallel(), "up_proj": ColwiseParallel(), "down_proj": RowwiseParallel()}
        for layer in nets["net"].model.layers:
            parallelize_module(layer.mlp, mesh, styles)


class Encoder(nn.Module):
    """Attention without a direction, and a table of positions that is a buffer."""

    def __init__(self):
        super().__init__()
        self.words, self.qkv, self.out = nn.Embedding(32, 16), nn.Linear(16, 48), nn.Linear(16, 32)
        self.register_buffer("table", torch.randn(LENGTH, 16))

    def forward(self, tokens):
        x = self.words(tokens) + self.table
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, 8)).permute(2, 0, 3, 1, 4)
        return self.out(x + self.attend(q, k, v).transpose(1, 2).flatten(2))

    def attend(self, q, k, v):
        return F.scaled_dot_product_attention(q, k, v)


class Encoded(Divided):
    """A buffer of the net has the sequence too, and no attention is causal."""

    causal_attention = False

    def nets(self):
        torch.manual_seed(3)
        return {"net": Encoder()}

    def context_buffers(self, nets, batch):
        return [(batch["tokens"], 1), (batch["targets"], 1), (nets["net"].table, 0)]

    def logits(self, net, batch):
        return net(batch["tokens"])


class Reconstructed(Encoded):
    """Two losses of one forward, whose units are known."""

    def units(self, batch):
        return {"tokens": int((batch["targets"] != -100).sum()), "size": batch["tokens"].numel()}

    def loss(self, nets, batch):
        logits = self.logits(nets["net"], batch)
        tokens = cross_entropy(logits.flatten(0, 1), batch["targets"].flatten(), ignore_index=-100, reduction="sum")
        size = mse_loss(logits.square().mean(-1), torch.ones(logits.shape[:2]), reduction="sum")
        return {
            "tokens": Loss(tokens, (batch["targets"] != -100).sum()),
            "size": Loss(size, batch["tokens"].numel()),
        }


class DividedMixture(Divided):
    """A Mixtral with four experts in each layer."""

    nets = Mixture.nets
    experts: int = 4


class EvenDividedMixture(DividedMixture):
    """Its routers send as many tokens to each of four experts, by their place."""

    def nets(self):
        nets = super().nets()
        for layer in nets["net"].model.layers:
            layer.mlp.gate.register_forward_hook(evenly)
        return nets


class SkewedMixture(DividedMixture):
    """Its routers send nearly all tokens to two experts, of which one rank has both."""

    def nets(self):
        nets = super().nets()
        for layer in nets["net"].model.layers:
            layer.mlp.gate.register_forward_hook(_skewed)
        return nets


def _skewed(gate, args, routed):
    logits, scores, index = routed
    first = torch.tensor([0, 1], device=index.device).expand_as(index)
    return logits, scores, torch.where(args[0][:, :1] > -0.5, first, index)


class DividedSharedExpert(Divided):
    """A Qwen2-MoE, whose layers have an expert that all tokens take too."""

    nets = SharedExpert.nets


class DividedNormedMixture(Divided):
    """A Qwen3-MoE: norms of single heads."""

    nets = NormedMixture.nets


MIXTURES = {
    "divided mixture": DividedMixture,
    "skewed mixture": SkewedMixture,
    "divided shared expert": DividedSharedExpert,
    "divided normed mixture": DividedNormedMixture,
}
"""Jobs whose nets have experts."""
CARRIED = {
    "divided llama": Divided,
    "divided llama, known": Known,
    "divided llama, adapted": Adapted,
    "divided llama, whole attention": WholeAttention,
    "divided encoder": Encoded,
    "divided losses": Reconstructed,
}


class Validated(Divided):
    """A validation sees whole sequences."""

    def nets(self):
        torch.manual_seed(2)
        return {"net": LlamaForCausalLM(LlamaConfig(**SIZES | {"num_hidden_layers": 3}, **HEADS))}

    def validate(self, nets, batch):
        return {"loss": self.loss(nets, batch).sum / 8}


class Recomputed(Validated):
    """Without a validation."""

    validates = False


class Long(Divided):
    """Sequences of one length."""

    tokens: int = 16

    def batch(self, shape):
        return {name: torch.zeros(shape.items, self.tokens, dtype=torch.int64) for name in super().batch(shape)}


class Tokens(Divided):
    """Sequences of lengths that are asked for; planned alone, and never run."""

    longest: int | None = LENGTH
    dataset = Job.dataset

    def batch(self, shape):
        return {name: torch.zeros(shape.items, shape.length, dtype=torch.int64) for name in super().batch(shape)}


class Attending(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(16, 48), nn.Linear(16, 16)

    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, 8)).permute(2, 0, 3, 1, 4)
        return x + self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class Tabled(nn.Module):
    """A net with a table of positions, whose first stage has no attention."""

    def __init__(self):
        super().__init__()
        self.words, self.first = nn.Embedding(32, 16), nn.Linear(16, 16)
        self.blocks, self.out = nn.ModuleList([Attending(), Attending()]), nn.Linear(16, 32)
        self.register_buffer("table", torch.randn(LENGTH, 16))

    def forward(self, tokens):
        x = self.first(self.words(tokens) + self.table)
        for block in self.blocks:
            x = block(x)
        return self.out(x)


class EncodedStages(Encoded):
    """Its first stage has no attention, and its net's table has the sequence."""

    def nets(self):
        torch.manual_seed(3)
        return {"net": Tabled()}

    def pipeline(self, nets):
        return ["net.words", "net.first", "net.blocks.0", "net.blocks.1", "net.out"]


STAGED = {
    "divided llama": Divided, "divided stages": Validated, "divided table": EncodedStages,
    "divided stages, interleaved_1f1b": Validated, "divided stages, interleaved_zero_bubble": Validated,
    "recomputed sequences": Recomputed,
}  # fmt: skip
"""Jobs on stages whose ranks hold parts of sequences."""
