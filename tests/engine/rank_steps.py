"""What sharded ranks do in test_fsdp2.py: torchrun --nproc-per-node N -m tests.engine.rank_steps FOLDER."""

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from memfit.apply.checkpointing import recompute
from memfit.apply.train_state import build
from memfit.apply.window import MicroBatch, run_window
from memfit.engine.factory import make_engine
from memfit.engine.process_group import join
from memfit.errors import InputError
from memfit.job import Job, Loss
from testing.nets import Transformer
from tests.engine import built_in_jobs, context_jobs, encoder_jobs, expert_jobs
from tests.engine.ranks import CPU, SIZES, Counted, Gan, Sentences, count, micro_batch, sentences, vectors
from tests.engine.tensor_jobs import CARRIED, words


class Blocks(Job):
    """Blocks that share a parameter with the root, and one that does not; clipped, averaged."""

    clip: float | None = 0.5
    ema: float | None = 0.9

    def nets(self):
        torch.manual_seed(4)
        return {"net": Tied()}

    def optimizers(self, nets):
        return {"net": torch.optim.AdamW(nets["net"].parameters(), lr=0.01)}

    def loss(self, nets, batch):
        return Loss(nets["net"](batch).square().sum(), len(batch))


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(4, 7), nn.Tanh(), nn.Linear(7, 4)) for _ in range(3))
        self.out = nn.Linear(4, 7)
        self.blocks[0][0].weight = self.out.weight

    def forward(self, x):
        for block in self.blocks:
            x = x + block(x)
        return self.out(x)


class Stages(Blocks):
    """What is recomputed holds several blocks, each gathered alone."""

    def nets(self):
        torch.manual_seed(5)
        return {"net": nn.Sequential(Stage(), Stage())}


class Stage(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(4, 7), nn.Tanh(), nn.Linear(7, 4)) for _ in range(2))

    def forward(self, x):
        for block in self.blocks:
            x = torch.tanh(x + block(x))
        return x


class Borrowed(Blocks):
    """The net and the loss call modules of blocks without the blocks, before them, after them and alone."""

    def nets(self):
        torch.manual_seed(6)
        return {"net": Borrowing()}

    def loss(self, nets, batch):
        out = nets["net"](batch)
        return Loss(nets["net"].blocks[1].up(nets["net"].head(out)).square().sum(), len(batch))


class Borrowing(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Conditioned() for _ in range(3))
        self.head = nn.Linear(4, 4)

    def forward(self, x):
        sign = (x[:, 0] > 0).long()
        stack = [self.blocks[0].embed(sign), x]
        x = self.blocks[2].take(stack) + stack.pop()
        for block in self.blocks:
            x = x + block(x, sign)
        return self.head(x) * self.blocks[0].embed(sign)


class Conditioned(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.take = nn.Embedding(2, 4), Last()
        self.up, self.down = nn.Linear(4, 7), nn.Linear(7, 4)

    def forward(self, x, sign):
        return self.down(torch.tanh(self.up(self.take([x])))) + self.embed(sign)


class Last(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, stack):
        return self.layer(stack.pop())


class Scaling(nn.Module):
    """Single numbers that are trained: one in a block, one that a loss reads, one of which a step knows nothing."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Gated() for _ in range(3))
        self.temperature, self.unused = nn.Parameter(torch.tensor(0.7)), nn.Parameter(torch.tensor(1.0))

    def forward(self, x):
        for block in self.blocks:
            x = x + block(x)
        return x * self.temperature.exp()


class Gated(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down, self.gate = nn.Linear(4, 7), nn.Linear(7, 4), nn.Parameter(torch.tensor(0.5))

    def forward(self, x):
        return self.down(torch.tanh(self.up(x))) * self.gate


class Numbers(Blocks):
    def nets(self):
        torch.manual_seed(8)
        return {"net": Scaling()}

    def loss(self, nets, batch):
        return Loss(nets["net"](batch).square().sum() * nets["net"].temperature.exp(), len(batch))


CASES = {
    "late units": (Sentences, sentences, {}),
    "units before": (Counted, sentences, {"sync_each_micro_batch": False}),
    "two nets": (Gan, vectors, {}),
    "two nets, scattered once": (Gan, vectors, {"sync_each_micro_batch": False}),
    "blocks": (Blocks, vectors, {}),
    "offloaded": (Blocks, vectors, {"cpu_offload": True}),
    "offloaded, scattered once": (Gan, vectors, {"cpu_offload": True, "sync_each_micro_batch": False}),
    "stages, selective": (Stages, vectors, {}),
    "stages, full": (Stages, vectors, {}),
    "borrowed": (Borrowed, vectors, {}),
    "borrowed, full": (Borrowed, vectors, {}),
    "borrowed, offloaded, scattered once": (Borrowed, vectors, {"cpu_offload": True, "sync_each_micro_batch": False}),
    "numbers": (Numbers, vectors, {}),
    "numbers, offloaded, scattered once": (Numbers, vectors, {"cpu_offload": True, "sync_each_micro_batch": False}),
    "labelled dit": (built_in_jobs.Labelled, built_in_jobs.batches(built_in_jobs.Labelled), {}),
}
TENSOR_CASES = {name: (kind, words, {}) for name, kind in CARRIED.items()}
"""Nets whose layers are cut."""
BUILT_IN_CASES = {name: (kind, built_in_jobs.batches(kind), {}) for name, kind in built_in_jobs.CARRIED.items()}
ENCODER_CASES = {name: (kind, encoder_jobs.batches(kind), {}) for name, kind in encoder_jobs.CARRIED.items()}
"""Nets that are cut as a forward shows."""
EXPERT_CASES = {name: (kind, words, {}) for name, kind in expert_jobs.CARRIED.items()}
"""Nets whose experts are divided."""
CONTEXT_CASES = {name: (kind, context_jobs.sequences, {}) for name, kind in context_jobs.CARRIED.items()}
"""Nets whose sequences are divided."""
DIVIDED_MIXTURES = {name: (kind, context_jobs.sequences, {}) for name, kind in context_jobs.MIXTURES.items()}
"""Nets with experts whose sequences are divided."""
DIVIDED_MIXTURES["divided mixture, parts"] = DIVIDED_MIXTURES["divided mixture"]
CONTEXT_CASES["divided llama, full"] = CONTEXT_CASES["divided llama"]
TENSOR_CASES["llama, parts"] = TENSOR_CASES["llama"]
TENSOR_CASES["linear attention, parts"] = TENSOR_CASES["linear attention"]
EXPERT_CASES["mixture, parts"] = EXPERT_CASES["mixture"]
ALL_CASES = CASES | TENSOR_CASES | BUILT_IN_CASES | ENCODER_CASES | EXPERT_CASES | CONTEXT_CASES | DIVIDED_MIXTURES
PARTS = [f"net.model.layers.{i}.{part}" for i in range(2) for part in ("input_layernorm", "self_attn")]
MODES = {
    "stages, selective": {"net.0": "selective", "net.1": "selective"},
    "stages, full": {"net.0": "full", "net.1": "full"},
    "borrowed, full": {"net.blocks.0": "full", "net.blocks.1": "selective", "net.blocks.2.take": "full"},
    "divided llama, full": {"net.model.layers.0": "full", "net.model.layers.1": "full"},
    "llama, parts": dict.fromkeys([*PARTS, "net.model.layers.0.mlp"], "full"),
    "divided mixture, parts": dict.fromkeys([*PARTS, "net.model.layers.0.mlp.gate"], "full"),
    "linear attention, parts": {"net.model.layers.0.linear_attn": "full", "net.model.layers.1": "selective"},
    "mixture, parts": dict.fromkeys([*PARTS, "net.model.layers.0.mlp.gate"], "full"),
}
SHARES = {
    1: [[0, 1, 2, 3, 4]],
    2: [[0, 1, 2], [3, 4, None]],
    3: [[0, 1], [2, None], [3, 4]],
    4: [[0, 1], [2, None], [3, None], [4, None]],
    8: [[0], [1], [None], [2], [3], [None], [4], [None]],
}
"""Micro-batches of each rank by world; None: one that does not count, so that all ranks run as many."""


def whole(tensor):
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def train(case, engine, choices=None):
    """Losses, norms, weights and averages after two windows."""
    kind, data, _ = ALL_CASES[case]
    train_state = build(kind(), CPU, engine)
    parts = data(SIZES)
    numbers = SHARES[engine.data_world][engine.data_rank] if engine else range(len(SIZES))
    micro = [
        micro_batch(train_state.job, parts[i]) if i is not None else idle(train_state.job, parts[0]) for i in numbers
    ]
    collected = []
    for _ in range(2):
        with recompute(train_state.nets, MODES.get(case, {})):
            result = run_window(train_state, micro)
        collected.append({name: float(value) for name, value in result.losses.items()})
        collected.append({name: float(value) for name, value in result.norms.items() if value is not None})
    nets = {**train_state.nets, **{f"average of {name}": net for name, net in train_state.ema.items()}}
    weights = {f"{name}.{key}": whole(value) for name, net in nets.items() for key, value in net.state_dict().items()}
    return {"weights": weights, "numbers": collected}


def idle(job, part):
    return MicroBatch(fetch=lambda: part, padded_units=count(part), units=job.units(part), counts=False)


class Outside(Transformer):
    def loss(self, nets, batch):
        return Loss(nn.functional.linear(torch.randn(2, self.dim), nets["dit"].out.weight).sum(), 2)


class Own(torch.optim.AdamW):
    """An optimizer that is not torch's."""


class OwnStep(Sentences):
    def optimizers(self, nets):
        return {"net": Own(nets["net"].parameters())}


class Apart(Gan):
    unsynchronised = ("judge",)


def refusals(engine):
    """What the engine says of jobs that it cannot carry."""
    said = []
    for kind in (OwnStep, Apart, Outside):
        try:
            train_state = build(kind(), CPU, engine)
            run_window(train_state, [micro_batch(train_state.job, torch.randn(2, 4))])
        except InputError as error:
            said.append(str(error))
    return said


def main():
    join()
    rank, folder = dist.get_rank(), Path(sys.argv[1])
    by_name = {case: train(case, make_engine("fsdp2", CPU, **choices)) for case, (_, _, choices) in CASES.items()}
    by_name["refusals"] = refusals(make_engine("fsdp2", CPU))
    torch.save(by_name, folder / f"{rank}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
