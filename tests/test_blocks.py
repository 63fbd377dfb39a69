"""pytest tests/test_blocks.py: which modules of a net are its blocks."""

import torch
from peft import LoraConfig, inject_adapter_in_model
from torch import nn
from transformers import T5Config, T5Model

from memfit.blocks import beside_blocks, repeated_blocks


class Residual(nn.Module):
    """A block with a single child, as torchvision's inverted residuals are, and a gate that others have too."""

    def __init__(self, *parts: nn.Module) -> None:
        super().__init__()
        self.body = nn.Sequential(*parts)


class Gate(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.into, self.out = nn.Conv2d(width, 1, 1), nn.Conv2d(1, width, 1)


class Stage(nn.Module):
    def __init__(self, blocks: int) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(Residual(nn.Conv2d(8, 8, 3), nn.BatchNorm2d(8)) for _ in range(blocks)))


def test_a_block_may_have_a_single_child_and_a_small_part_that_is_more_numerous_is_none():
    net = nn.Sequential(
        *(Residual(nn.Conv2d(8, 8, 3), Gate(8), nn.Conv2d(8, 8, 3)) for _ in range(3)), nn.Sequential(Gate(8), Gate(8))
    )
    assert repeated_blocks({"net": net}) == ["net.0", "net.1", "net.2", "net.3.0", "net.3.1"]


def test_of_stages_their_blocks_are_meant():
    net = nn.Sequential(Stage(2), Stage(3))
    assert repeated_blocks({"net": net}) == [f"net.{s}.blocks.{b}" for s, n in ((0, 2), (1, 3)) for b in range(n)]


def test_weights_with_adapters_beside_them_are_no_blocks():
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.query, self.feed = nn.Linear(8, 8), nn.Linear(8, 64)
            self.one, self.other = nn.ModuleList([nn.Linear(8, 8)]), nn.ModuleList([nn.Linear(8, 8)])

    net = nn.Module()
    net.blocks = nn.ModuleList(Block() for _ in range(2))
    inject_adapter_in_model(LoraConfig(r=2, target_modules=["query", "one.0", "other.0"]), net)
    assert repeated_blocks({"net": net}) == ["net.blocks.0", "net.blocks.1"]


def test_parametrized_weights_are_no_blocks():
    layers = [nn.utils.parametrizations.weight_norm(nn.Conv1d(4, 4, 3)) for _ in range(3)]
    assert repeated_blocks({"net": nn.Sequential(*layers)}) == []


def test_blocks_of_transformers_that_hold_a_list_of_layers():
    with torch.device("meta"):
        net = T5Model(T5Config(vocab_size=8, d_model=8, d_ff=8, d_kv=4, num_layers=2, num_heads=2))
    assert repeated_blocks({"t5": net}) == [f"t5.{half}.block.{k}" for half in ("encoder", "decoder") for k in (0, 1)]


def test_what_lies_beside_the_blocks_of_a_repeated_module():
    """Experts are the blocks of a mixture; attention lies beside them, in layers of their own."""

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.attention = nn.LayerNorm(4), nn.MultiheadAttention(4, 2)
            self.mixture = nn.Module()
            self.mixture.router = nn.Linear(4, 3)
            self.mixture.experts = nn.ModuleList(nn.Sequential(nn.Linear(4, 9), nn.Linear(9, 4)) for _ in range(3))

    net = nn.Sequential(Layer(), Layer())
    assert repeated_blocks({"net": net}) == [f"net.{k}.mixture.experts.{e}" for k in (0, 1) for e in range(3)]
    assert beside_blocks({"net": net}) == ["net.0.attention", "net.1.attention"]
