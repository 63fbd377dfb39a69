"""Nets that neither transformers nor their modules' names say how to cut: encoders, and encoders with decoders."""

from typing import ClassVar

import torch
from torch import nn
from transformers import (
    BeitConfig,
    BeitForImageClassification,
    BertConfig,
    BertForMaskedLM,
    BertForSequenceClassification,
    CLIPConfig,
    CLIPModel,
    FalconConfig,
    FalconForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    ModernBertConfig,
    ModernBertForMaskedLM,
    MPNetConfig,
    MPNetForMaskedLM,
    T5Config,
    T5ForConditionalGeneration,
    UMT5Config,
    UMT5ForConditionalGeneration,
    ViTConfig,
    ViTForImageClassification,
    WhisperConfig,
    WhisperForConditionalGeneration,
)

from memfit.job import Job, Loss

TOKENS, SIDE = 8, 32
SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
BOTH_SIDES = {
    "d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64,
}  # fmt: skip
SMALL_T5 = {
    "vocab_size": 64, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_heads": 4, "num_layers": 2, "dropout_rate": 0.0,
    "decoder_start_token_id": 0,
}  # fmt: skip
WITHOUT_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


class Encoder(Job):
    """A net of transformers with a loss of its own, which is a mean over samples."""

    clip: float | None = 0.5
    ema: float | None = 0.9
    net_class: ClassVar
    config: ClassVar

    def nets(self):
        torch.manual_seed(2)
        return {"net": self.net_class(self.config)}

    def optimizers(self, nets):
        return {"net": torch.optim.SGD(nets["net"].parameters(), lr=0.05, momentum=0.9)}

    def dataset(self):
        made = self.made(40, torch.Generator().manual_seed(4))
        return [{key: value[number] for key, value in made.items()} for number in range(40)]

    def batch(self, shape):
        return self.made(shape.items, None)

    def made(self, items, generator):
        ids = torch.randint(2, 64, (items, TOKENS), generator=generator)
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids}

    def loss(self, nets, batch):
        items = len(next(iter(batch.values())))
        return Loss(nets["net"](**batch).loss * items, items)


class Bert(Encoder):
    net_class = BertForMaskedLM
    config = BertConfig(vocab_size=64, max_position_embeddings=16, **SIZES, **WITHOUT_DROPOUT)


class ModernBert(Encoder):
    """Queries, keys and values are one layer, and so are the gate and the values of the feed-forward."""

    net_class = ModernBertForMaskedLM
    config = ModernBertConfig(
        vocab_size=64, pad_token_id=0, bos_token_id=1, eos_token_id=1, cls_token_id=1, sep_token_id=1, **SIZES
    )


class MpNet(Encoder):
    """An embedding of relative positions for all layers, and a width of all heads that its attention counts."""

    net_class = MPNetForMaskedLM
    config = MPNetConfig(vocab_size=64, max_position_embeddings=16, **SIZES, **WITHOUT_DROPOUT)


class T5(Encoder):
    """Embeddings of relative positions, and attention of a decoder to an encoder."""

    net_class = T5ForConditionalGeneration
    config = T5Config(**SMALL_T5)


class Umt5(T5):
    """Attention counts heads by an attribute; that of the decoder to the encoder is of the same class, and whole."""

    net_class = UMT5ForConditionalGeneration
    config = UMT5Config(
        vocab_size=64,
        d_model=32,
        d_kv=8,
        d_ff=64,
        num_heads=4,
        num_layers=2,
        decoder_start_token_id=0,
        dropout_rate=0.0,
    )


class Vit(Encoder):
    net_class = ViTForImageClassification
    config = ViTConfig(image_size=SIDE, patch_size=8, num_labels=4, **SIZES, **WITHOUT_DROPOUT)

    def made(self, items, generator):
        pictures = torch.randn(items, 3, SIDE, SIDE, generator=generator)
        return {"pixel_values": pictures, "labels": torch.randint(4, (items,), generator=generator)}


class Beit(Vit):
    """Biases of heads are parameters of attention, and a function of the library keeps their indices."""

    net_class = BeitForImageClassification
    config = BeitConfig(
        image_size=SIDE, patch_size=8, num_labels=4, use_relative_position_bias=True, drop_path_rate=0.0, **SIZES,
        **WITHOUT_DROPOUT,
    )  # fmt: skip


class Clip(Encoder):
    """Two towers, and a temperature that is a single number."""

    net_class = CLIPModel
    config = CLIPConfig(
        text_config={
            "vocab_size": 64,
            "max_position_embeddings": TOKENS,
            "bos_token_id": 0,
            "eos_token_id": 1,
            **SIZES,
        },
        vision_config={"image_size": SIDE, "patch_size": 8, **SIZES},
        projection_dim=16,
    )

    def made(self, items, generator):
        ids = torch.randint(2, 64, (items, TOKENS), generator=generator)
        ids[:, -1] = 1
        return {"input_ids": ids, "pixel_values": torch.randn(items, 3, SIDE, SIDE, generator=generator)}

    def loss(self, nets, batch):
        likeness = nets["net"](**batch).logits_per_text.diagonal()
        return Loss((likeness - 1).square().sum(), len(likeness))


class Whisper(Encoder):
    """Attention that counts heads by an attribute."""

    net_class = WhisperForConditionalGeneration
    config = WhisperConfig(
        vocab_size=64, num_mel_bins=8, max_source_positions=16, max_target_positions=16, decoder_start_token_id=0,
        pad_token_id=0, bos_token_id=1, eos_token_id=1, dropout=0.0, **BOTH_SIDES,
    )  # fmt: skip

    def made(self, items, generator):
        labels = torch.randint(2, 64, (items, TOKENS), generator=generator)
        return {"input_features": torch.randn(items, 8, 32, generator=generator), "labels": labels}


class Classified(Encoder):
    """What lies between its last block and its classifier is a module too, and takes one token."""

    net_class = BertForSequenceClassification
    config = BertConfig(vocab_size=64, max_position_embeddings=16, num_labels=4, **SIZES, **WITHOUT_DROPOUT)

    def made(self, items, generator):
        made = super().made(items, generator)
        return {**made, "labels": torch.randint(4, (items,), generator=generator)}


class Decoder(Encoder):
    """Two embeddings are added before the first block, so that no stage begins between them."""

    net_class = GPT2LMHeadModel
    config = GPT2Config(
        vocab_size=64, n_embd=32, n_layer=2, n_head=4, resid_pdrop=0.0, attn_pdrop=0.0, embd_pdrop=0.0,
        tie_word_embeddings=False, bos_token_id=0, eos_token_id=1,
    )  # fmt: skip


class Groups(Encoder):
    """Falcon: linear layers with a forward of their own, queries with the keys and values of their group in one weight,
    and outputs that are changed in place."""

    net_class = FalconForCausalLM
    config = FalconConfig(
        vocab_size=64, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_kv_heads=2,
        new_decoder_architecture=True, bos_token_id=0, eos_token_id=1,
    )  # fmt: skip


STAGED = {"vit": Vit, "beit": Beit, "classified": Classified, "decoder of words": Decoder}
"""Nets that are cut into stages as a forward shows."""
CARRIED = {
    "bert": Bert, "modern bert": ModernBert, "mpnet": MpNet, "t5": T5, "umt5": Umt5, "vit": Vit, "beit": Beit,
    "clip": Clip, "whisper": Whisper, "decoder of words": Decoder, "groups of queries": Groups,
}  # fmt: skip


def batches(kind):
    """Micro-batches of a job of these, of given sizes."""

    def parts(sizes):
        made = kind().made(sum(sizes), torch.Generator().manual_seed(4))
        split = {key: value.split(sizes) for key, value in made.items()}
        return [{key: value[number] for key, value in split.items()} for number in range(len(sizes))]

    return parts


class Attention(nn.Module):
    """Attention whose layers have names of its own; it counts heads, and may normalise queries and keys.

    Args:
        norm: over which numbers of queries and keys, "head" or "all"; empty: none.
        bias: of scores, by head: "learned" of the module, "embedded" by an embedding; empty: none.
    """

    def __init__(self, width=16, heads=4, norm="", bias="", reads=False):
        super().__init__()
        self.heads, self.reads = heads, reads
        self.ask, self.key, self.give, self.back = (nn.Linear(width, width) for _ in range(4))
        self.norm = nn.LayerNorm({"head": width // heads, "all": width}[norm]) if norm else nn.Identity()
        self.over_heads = norm == "head"
        self.near = nn.Embedding(TOKENS, heads) if bias == "embedded" else None
        self.far = nn.Parameter(torch.zeros(heads, TOKENS, TOKENS)) if bias == "learned" else None

    def forward(self, x):
        ask, key = self.ask(x), self.key(x)
        if not self.over_heads:
            ask, key = self.norm(ask), self.norm(key)
        ask, key, give = (
            part.view(*part.shape[:2], self.heads, -1).transpose(1, 2) for part in (ask, key, self.give(x))
        )
        if self.over_heads:
            ask, key = self.norm(ask), self.norm(key)
        scores = ask @ key.transpose(-1, -2)
        if self.near is not None:
            apart = (torch.arange(TOKENS)[:, None] - torch.arange(TOKENS)).abs()
            scores = scores + self.near(apart.to(x.device)).permute(2, 0, 1)
        if self.far is not None:
            scores = scores + self.far
        out = (scores.softmax(-1) @ give).transpose(1, 2).flatten(2)
        if self.reads:
            x = x + self.back.weight.sum()
        return x + self.back(out)


class OwnAttention(Encoder):
    """A feed-forward around attention of one's own."""

    how: ClassVar = {}

    def nets(self):
        torch.manual_seed(2)
        feed_forward = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16))
        return {"net": nn.Sequential(nn.Embedding(64, 16), nn.LayerNorm(16), Attention(**self.how), feed_forward)}

    def loss(self, nets, batch):
        out = nets["net"](batch["input_ids"])
        return Loss(out.square().mean((1, 2)).sum(), len(out))


class NormedHeads(OwnAttention):
    """Norms of single heads see a part of them."""

    how: ClassVar = {"norm": "head", "bias": "embedded"}


class Product(nn.Module):
    """A linear layer whose weight is (inputs, outputs), or is read as (outputs, inputs).

    Args:
        more: what else it does: nothing, a "softmax" of its outputs, or the product "twice".
    """

    def __init__(self, inputs, outputs, across=False, more=""):
        super().__init__()
        self.matrix = nn.Parameter(torch.randn(*((outputs, inputs) if across else (inputs, outputs))) / 4)
        self.shift = nn.Parameter(torch.zeros(outputs))
        self.across, self.more, self.width = across, more, outputs

    def forward(self, x):
        matrix = self.matrix.T if self.across else self.matrix
        out = (x.reshape(-1, x.shape[-1]) @ matrix + self.shift) / 2
        if self.more == "twice":
            out = out + x.reshape(-1, x.shape[-1]) @ matrix
        return (out.softmax(-1) if self.more == "softmax" else out).view(*x.shape[:-1], self.width)


class OwnFeedForward(nn.Module):
    """Gates and values in one layer, and sums in place."""

    def __init__(self, inner=32, **how):
        super().__init__()
        self.wide = Product(16, 2 * inner, **how)
        self.back = Product(inner, 16, across=True)

    def forward(self, x):
        gate, value = self.wide(x).chunk(2, -1)
        out = self.back(gate * value)
        out += x
        return out


class OwnProducts(OwnAttention):
    """Linear layers that are no ``nn.Linear``, and outputs of linear layers that are changed in place."""

    def nets(self):
        torch.manual_seed(2)
        changed = nn.Sequential(nn.Linear(16, 32), nn.ReLU(inplace=True), nn.Linear(32, 16))
        return {"net": nn.Sequential(nn.Embedding(64, 16), nn.LayerNorm(16), OwnFeedForward(**self.how), changed)}


CARRIED["norms of own heads"] = NormedHeads
CARRIED["products"] = OwnProducts
