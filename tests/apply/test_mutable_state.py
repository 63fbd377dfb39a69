"""Recomputing with arguments and attributes that a forward changes, as a cache of keys and values."""

from collections import OrderedDict

import pytest
import torch
from torch import nn

from memfit.apply.checkpointing import recompute


class Cache:
    """Keys of each layer, appended to by its forward."""

    def __init__(self):
        self.layers, self.updated, self.named = [[], []], {}, OrderedDict()

    def append(self, layer, keys):
        self.layers[layer].append(keys)
        self.updated[layer] = True
        self.named[layer] = keys
        return torch.cat(self.layers[layer], 1)


class Block(nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.layer, self.calls, self.seen = layer, 0, []
        self.key, self.out = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x, cache):
        keys = self.key(x) if not cache.updated.get(self.layer) else cache.layers[self.layer][0]
        self.calls += 1
        self.seen.append(x.shape)
        return self.out(torch.tanh(cache.append(self.layer, keys)).sum(1, keepdim=True) + x)


@pytest.mark.parametrize("mode", ["full", "selective"])
def test_a_cache_that_a_forward_appends_to_is_as_it_was_while_it_is_recomputed(mode):
    torch.manual_seed(0)
    net = nn.ModuleList([Block(0), Block(1)])
    gradients, caches = [], []
    for modes in ({}, {"net.0": mode, "net.1": mode}):
        x, cache = torch.ones(2, 3, 4, requires_grad=True), Cache()
        with recompute({"net": net}, modes):
            y = x
            for block in net:
                y = block(y, cache)
            y.square().sum().backward()
        gradients.append([x.grad, *(p.grad.clone() for p in net.parameters())])
        caches.append(cache)
        net.zero_grad()
    for kept, again in zip(*gradients, strict=True):
        torch.testing.assert_close(kept, again)
    assert [len(layer) for layer in caches[1].layers] == [1, 1]
    assert list(caches[1].named) == [0, 1]
    assert [block.calls for block in net] == [2, 2]
    assert [len(block.seen) for block in net] == [2, 2]


def test_a_hugging_face_encoder_decoder_with_its_cache_recomputes():
    from transformers import T5Config, T5ForConditionalGeneration

    torch.manual_seed(0)
    sizes = {"d_model": 16, "d_kv": 4, "d_ff": 32, "num_heads": 4, "num_layers": 2, "dropout_rate": 0.0}
    net = T5ForConditionalGeneration(T5Config(vocab_size=64, decoder_start_token_id=0, **sizes)).train()
    ids = torch.randint(64, (2, 8))
    collected = []
    for mode in ("keep", "full"):
        modes = {f"net.{part}.block.{i}": mode for part in ("encoder", "decoder") for i in range(2)}
        with recompute({"net": net}, modes):
            net(input_ids=ids, labels=ids, use_cache=True).loss.backward()
        collected.append([p.grad.clone() for p in net.parameters()])
        net.zero_grad()
    for kept, again in zip(*collected, strict=True):
        torch.testing.assert_close(kept, again)
