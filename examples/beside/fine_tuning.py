"""What the five scripts of this folder share: a small decoder, paragraphs of memfit's licence, a loss.

Rows are bytes of text, padded to the longest of a micro-batch; only bytes that are followed by another one count. So
micro-batches have different numbers of valid tokens, and the last window is short.
"""

from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.utils.rnn import pad_sequence
from transformers import LlamaConfig, LlamaForCausalLM

LICENSE = Path(__file__).parents[2] / "LICENSE"
MICRO_BATCH, ACCUMULATION, EPOCHS, RATE, CLIP = 4, 3, 2, 1e-3, 1.0
Batch = dict[str, Tensor]


def decoder() -> nn.Module:
    """A Llama of two layers, the same at every call."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    return LlamaForCausalLM(LlamaConfig(vocab_size=256, tie_word_embeddings=False, use_cache=False, **sizes))


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    """The optimizer of all five."""
    return torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=0.0)


def paragraphs(count: int = 29, longest: int = 160) -> list[Batch]:
    """The licence's first paragraphs, as bytes."""
    texts = [" ".join(text.split()).encode()[:longest] for text in LICENSE.read_text().split("\n\n")]
    rows = [torch.tensor(list(text)) for text in texts if len(text) > 20][:count]
    return [{"input_ids": row, "labels": torch.cat([torch.tensor([-100]), row[1:]])} for row in rows]


def collate(rows: list[Batch]) -> Batch:
    """A micro-batch: (rows, longest) of bytes, and of labels that are -100 where nothing counts."""
    ids = pad_sequence([row["input_ids"] for row in rows], batch_first=True)
    labels = pad_sequence([row["labels"] for row in rows], batch_first=True, padding_value=-100)
    return {"input_ids": ids, "labels": labels}


def window(rows: list[Batch]) -> list[Batch]:
    """The micro-batches of one optimizer step."""
    return [collate(rows[start : start + MICRO_BATCH]) for start in range(0, len(rows), MICRO_BATCH)]


def mean_loss(model: nn.Module, batch: Batch) -> Tensor:
    """The mean over the tokens that count."""
    logits = model(input_ids=batch["input_ids"]).logits[:, :-1]
    return cross_entropy(logits.flatten(0, 1).float(), batch["labels"][:, 1:].flatten(), ignore_index=-100)


def tokens(batch: Batch) -> int:
    """How many tokens count."""
    return int((batch["labels"][:, 1:] != -100).sum())
