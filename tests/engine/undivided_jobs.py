"""Jobs whose sequences cannot be divided, with what is said of each."""

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.functional import scaled_dot_product_attention
from transformers import BartConfig, BartForCausalLM, MistralConfig, MistralForCausalLM

from memfit.job import Job
from tests.engine.context_jobs import LENGTH, Divided, DividedMixture, Encoded, Encoder
from tests.engine.tensor_jobs import HEADS, SIZES, ScaledLogits


class Silent(Divided):
    def context_buffers(self, nets, batch):
        return []


class Unsaid(Job):
    nets, optimizers, dataset, batch, loss = (
        Divided.nets, Divided.optimizers, Divided.dataset, Divided.batch, Divided.loss,
    )  # fmt: skip
    logits = Divided.logits


class Masked(Divided):
    def logits(self, net, batch):
        mask = torch.ones_like(batch["tokens"])
        return net(batch["tokens"], attention_mask=mask, position_ids=batch["positions"], use_cache=False).logits


class Windowed(Divided):
    def nets(self):
        return {"net": MistralForCausalLM(MistralConfig(**SIZES, **HEADS, sliding_window=4))}


class Counting(Divided):
    """The net counts positions by itself."""

    def logits(self, net, batch):
        return net(batch["tokens"], use_cache=False).logits


class CountingInside(Counting):
    """The same of a net in another one."""

    def nets(self):
        return {"net": ScaledLogits.Net(super().nets()["net"])}


class Balancing(DividedMixture):
    """The loss has the balancing loss of its routers, which is no sum over tokens."""

    def logits(self, net, batch):
        given = net(batch["tokens"], position_ids=batch["positions"], use_cache=False, output_router_logits=True)
        return given.logits + given.aux_loss


class BalancingAlways(DividedMixture):
    """The same where the net is made so."""

    def nets(self):
        nets = super().nets()
        nets["net"].config.output_router_logits = True
        return nets


class Positionless(Counting):
    """The net takes no positions."""

    def nets(self):
        sizes = {"d_model": 16, "decoder_layers": 1, "decoder_attention_heads": 2, "decoder_ffn_dim": 16}
        return {"net": BartForCausalLM(BartConfig(vocab_size=32, max_position_embeddings=LENGTH, **sizes))}


class NotCausal(Encoded):
    causal_attention = True


class DroppedEncoder(Encoder):
    def attend(self, q, k, v):
        return F.scaled_dot_product_attention(q, k, v, dropout_p=0.1)


class ImportedEncoder(Encoder):
    def attend(self, q, k, v):
        return scaled_dot_product_attention(q, k, v)


class MaskedFourWays(Encoder):
    def attend(self, q, k, v):
        return F.scaled_dot_product_attention(q, k, v, attn_mask=torch.ones(*q.shape[:3], q.shape[2]).tril().bool())


class EncoderByHand(Encoder):
    def attend(self, q, k, v):
        return (q @ k.mT).softmax(-1) @ v


class MaskedEncoder(Encoder):
    def attend(self, q, k, v):
        return F.scaled_dot_product_attention(q, k, v, attn_mask=torch.ones(q.shape[2], q.shape[2]).tril().bool())


class ConvolvedEncoder(Encoder):
    def __init__(self):
        super().__init__()
        self.mix = nn.Conv1d(16, 16, 3, padding=1)

    def attend(self, q, k, v):
        mixed = self.mix(q.transpose(1, 2).flatten(2).mT).mT.unflatten(-1, (2, 8)).transpose(1, 2)
        return super().attend(mixed, k, v)


class Convolved(Encoded):
    def nets(self):
        return {"net": ConvolvedEncoder()}


class Dropped(Encoded):
    def nets(self):
        return {"net": DroppedEncoder()}


class Imported(Encoded):
    def nets(self):
        return {"net": ImportedEncoder()}


class ByHand(Encoded):
    def nets(self):
        return {"net": EncoderByHand()}


class MaskedHeads(Encoded):
    def nets(self):
        return {"net": MaskedFourWays()}


class MaskedByHand(Encoded):
    def nets(self):
        return {"net": MaskedEncoder()}


class Odd(Divided):
    def context_buffers(self, nets, batch):
        return [(tensor[:, :-1], 1) for tensor in batch.values()]


class Elsewhere(Divided):
    def context_buffers(self, nets, batch):
        return [(batch["tokens"].clone(), 1)]


class Uneven(Divided):
    def context_buffers(self, nets, batch):
        return [(batch["tokens"], 1), (batch["targets"], 0)]


REFUSED = {
    Unsaid: "the job does not say which tensors of a batch have the sequence",
    Silent: "gave [], not tensors with dimensions",
    Masked: "it is given an attention_mask, and torch's rings have no masks",
    Counting: "it is given no position_ids, and would count the tokens of every rank's part from 0",
    CountingInside: "net LlamaForCausalLM on cp: it is given no position_ids",
    Balancing: "net MixtralForCausalLM on cp: the balancing loss of its routers (output_router_logits) mixes tokens",
    BalancingAlways: "net MixtralForCausalLM on cp: the balancing loss of its routers (output_router_logits)",
    Positionless: "net BartForCausalLM on cp: it takes no position_ids",
    Convolved: "a convolution along the sequence would not see the tokens of the other ranks' parts",
    Windowed: "its attention has sliding_window, and torch's rings have none",
    NotCausal: "its causal_attention is set, and an attention is not causal",
    MaskedHeads: "an attention has attn_mask, and torch's rings have none",
    MaskedByHand: "torch's ring fails on an attention",
    Dropped: "an attention has dropout_p, and torch's rings have none",
    Imported: "an attention is called by a name that was imported",
    ByHand: "no net called torch's scaled_dot_product_attention",
    Odd: "a sequence of 15 does not divide by 4",
    Elsewhere: "neither in the batch nor a buffer of a net",
    Uneven: "its sequences have several lengths",
}
