"""Jobs for bench/fuzz.py: a good one, and its text with something wrong in it."""

from __future__ import annotations

import random

from bench.fuzz_parts.spoil import WORDS, spoil_bytes

GOOD = """
from typing import Literal

import torch
from torch import nn

import memfit


class Good(memfit.Job):
    width: int = 8
    rate: float = 0.1
    shuffle: bool = True
    kind: Literal["plain", "wide"] = "plain"
    windows: int = 4

    def nets(self):
        return {"net": nn.Linear(self.width, 2)}

    def optimizers(self, nets):
        return {"adam": torch.optim.AdamW(nets["net"].parameters(), lr=self.rate)}

    def batch(self, shape):
        return torch.randn(shape.items, self.width)

    def loss(self, nets, batch):
        return nets["net"](batch).square().sum(), len(batch)

    def dataset(self):
        return [torch.randn(self.width) for _ in range(12)]


class Long(memfit.Job):
    longest: int = 32

    def nets(self):
        return {"net": nn.Linear(8, 2)}

    def optimizers(self, nets):
        return {"adam": torch.optim.AdamW(nets["net"].parameters())}

    def batch(self, shape):
        return torch.randn(shape.items, shape.length, 8)

    def loss(self, nets, batch):
        return nets["net"](batch).square().sum(), batch.shape[0] * batch.shape[1]
"""
LENGTHS = {
    "csv": b"name,frames\na,8\nb,16\nc,12\nd,30\n",
    "tsv": b"name\tframes\na\t8\nb\t16\nc\t12\n",
    "jsonl": b'{"name": "a", "frames": 8}\n{"name": "b", "frames": 16.0}\n{"frames": 12}\n',
}
_EXPRESSIONS = (
    "None", "0", "-1", "1.5", "[]", "{}", "()", "'x'", "b'x'", "object()", "lambda *a: None",
    "float('nan')", "range(0)",
    "{'net': None}", "{1: 2}", "{'net': 3}", "{'': nn.Linear(1, 1)}", "nn.Linear(2, 2)", "torch.zeros(0)",
    "torch.tensor(1.)",
    "torch.zeros(1, device='meta')", "(torch.tensor(1.), 0)", "(torch.tensor(1.), -1)", "(1.0, 1)", "(None, None)",
    "torch.tensor(float('nan')), 1", "1 / 0", "open('/nowhere')", "exit(3)",
    "(_ for _ in ()).throw(KeyError('\\x1b[2J'))",
    "(_ for _ in ()).throw(KeyboardInterrupt())", "[].pop()", "self.nothing", "undefined", "__import__('nothing')",
    "{'net': nn.Identity()}", "{'net': nn.LazyLinear(2)}", "torch.randn(10**9, 10**9)",
    "(lambda f: f(f))(lambda f: f(f))",
    "(torch.zeros(3, requires_grad=True), 1)", "{'loss': 1}", "memfit.Loss(1, 2)", "memfit.Loss(torch.tensor(1), 1)",
)  # fmt: skip


def spoiled_job(chance: random.Random) -> bytes:
    """The good job with an expression, a line, a word or some bytes changed."""
    lines = GOOD.split("\n")
    returns = [number for number, line in enumerate(lines) if "return " in line][:5]
    fields = [number for number, line in enumerate(lines) if ": " in line and " = " in line and "def" not in line]
    for _ in range(chance.choice((1, 1, 2))):
        match chance.randrange(6):
            case 0 | 1:
                at = chance.choice(returns)
                lines[at] = f"        return {chance.choice(_EXPRESSIONS)}"
            case 2:
                at = chance.choice(fields)
                lines[at] = f"{lines[at].partition(' = ')[0]} = {chance.choice(_EXPRESSIONS)}"
            case 3:
                lines[chance.randrange(len(lines))] = ""
            case 4:
                at = chance.randrange(len(lines))
                words = lines[at].split(" ")
                words[chance.randrange(len(words))] = chance.choice(WORDS).encode("utf-8", "replace").decode()
                lines[at] = " ".join(words)
            case 5:
                return spoil_bytes("\n".join(lines).encode(), chance)
    return "\n".join(lines).encode("utf-8", "surrogatepass")
