"""Runs in this process whose memory really fails at a chosen point, for tests and bench/faults.py."""

import json
import resource
from pathlib import Path

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from memfit.apply.carried_state import CarriedState
from memfit.apply.train_state import build
from memfit.batch.windows import Windows
from memfit.engine.single import Single
from memfit.job import Job, Loss, Turn
from memfit.plan import PhasePolicy, Plan
from memfit.train.checkpoint.checkpoints import Checkpoints
from memfit.train.checkpoint.resume import resume
from memfit.train.checkpoint.saver import Saver
from memfit.train.launch import memory_limit
from memfit.train.loop.loop import train
from memfit.train.loop.run_context import RunContext
from memfit.train.loop.validation_data import validation_data
from memfit.train.run_folder import RunFolder

WINDOWS = 3


class Points:
    """Counts what is reached, and lets the real allocator fail at chosen ones, each as often as asked."""

    def __init__(self, fails=None):
        self.fails = dict(fails or {})
        self.reached = {}
        self.failed = 0

    def __call__(self, kind):
        point = (kind, self.reached.get(kind, 0))
        self.reached[kind] = point[1] + 1
        if self.fails.pop(point, 0):
            self.failed += 1
            run_out_of_memory()


ASKED = 16 << 30
"""Bytes: more than a process of the tests ever had, so that no block which malloc kept free can serve them."""


def run_out_of_memory():
    """A real allocation fails: RLIMIT_DATA is what the process has now, for a moment."""
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (memory_limit.data_bytes(), hard))
    try:
        torch.empty(ASKED, dtype=torch.uint8)
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))
    raise AssertionError("the limit did not hold")


class Spoiled(nn.Module):
    """Passes on what it gets; a point in forward and one in backward."""

    points = Points()

    def forward(self, x):
        if torch.is_grad_enabled() and self.training:
            self.points("forward")
            x = x * 1
            x.register_hook(lambda gradient: self.points("backward"))
        return x


class Plain(Job):
    """No dropout, no batch statistics: any split learns the same to rounding."""

    validate_every: int = 1
    rate: float = 0.1
    real_validation_batch = True

    def nets(self):
        torch.manual_seed(0)
        return {"net": nn.Sequential(nn.Linear(6, 16), Spoiled(), nn.Tanh(), nn.Linear(16, 1))}

    def optimizers(self, nets):
        return {"sgd": torch.optim.SGD(nets["net"].parameters(), lr=self.rate, momentum=0.9)}

    def batch(self, shape):
        return [torch.randn(shape.items, 6), torch.randn(shape.items)]

    def dataset(self):
        generator = torch.Generator().manual_seed(0)
        x = torch.randn(22, 6, generator=generator)
        return list(zip(x, x.sum(1), strict=True))

    def loss(self, nets, batch):
        error = (nets["net"](batch[0]).squeeze(-1) - batch[1]).square()
        return Loss(error.sum(), len(error))

    def validate(self, nets, batch):
        Spoiled.points("validate")
        return {"error": (nets["net"](batch[0]).squeeze(-1) - batch[1]).square().mean()}


class Noisy(Plain):
    """Dropout, BatchNorm, a draw in the loss, and two optimizers in one turn."""

    def nets(self):
        torch.manual_seed(0)
        front = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Dropout(0.2))
        return {"front": front, "net": nn.Sequential(Spoiled(), nn.Linear(16, 1))}

    def optimizers(self, nets):
        return {
            "front": torch.optim.AdamW(nets["front"].parameters(), lr=1e-2),
            "net": torch.optim.SGD(nets["net"].parameters(), lr=1e-2, momentum=0.9),
        }

    def loss(self, nets, batch):
        made = nets["net"](nets["front"](batch[0] + 0.1 * torch.randn_like(batch[0]))).squeeze(-1)
        return Loss((made - batch[1]).square().sum(), len(made))

    def validate(self, nets, batch):
        Spoiled.points("validate")
        return {"error": (nets["net"](nets["front"](batch[0])).squeeze(-1) - batch[1]).square().mean()}


class Gan(Noisy):
    """Two turns that share what is drawn; dropout and BatchNorm in both nets, an average, a schedule."""

    ema: float | None = 0.9
    clip: float | None = 1.0

    def nets(self):
        torch.manual_seed(0)
        maker = nn.Sequential(
            nn.Linear(6, 16), nn.BatchNorm1d(16), Spoiled(), nn.Tanh(), nn.Dropout(0.2), nn.Linear(16, 6)
        )
        judge = nn.Sequential(nn.Linear(6, 16), Spoiled(), nn.Dropout(0.2), nn.LeakyReLU(0.1), nn.Linear(16, 1))
        return {"maker": maker, "judge": judge}

    def optimizers(self, nets):
        return {name: torch.optim.Adam(net.parameters(), lr=1e-2) for name, net in nets.items()}

    def schedules(self, optimizers, windows):
        return {name: torch.optim.lr_scheduler.StepLR(optimizer, 2) for name, optimizer in optimizers.items()}

    def turns(self, optimizers):
        return [
            Turn(name="judge", loss=self.judged, optimizers=("judge",)),
            Turn(name="maker", loss=self.made, optimizers=("maker",)),
        ]

    def draw(self, nets, batch, shared):
        if "fake" not in shared:
            shared["fake"] = nets["maker"](torch.randn_like(batch[0]))
        return shared["fake"]

    def judged(self, nets, batch, shared):
        fake = self.draw(nets, batch, shared).detach()
        return Loss((nets["judge"](fake) - nets["judge"](batch[0])).sum(), len(fake))

    def made(self, nets, batch, shared):
        fake = self.draw(nets, batch, shared)
        return Loss(-nets["judge"](fake).sum(), len(fake))

    def units(self, batch):
        return {"judge": len(batch[1]), "maker": len(batch[1])}

    def validate(self, nets, batch):
        Spoiled.points("validate")
        return {"size": nets["maker"](batch[0]).square().mean()}


JOBS = {"plain": (Plain, 3), "noisy": (Noisy, 3), "gan": (Gan, 3), "gan, one micro-batch": (Gan, 8)}
"""Jobs, and their micro-batch; the global batch is 8."""


class EveryOperator(TorchDispatchMode):
    """A point at every operator."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        Spoiled.points("step")
        return func(*args, **(kwargs or {}))


class SpoiledSteps(Single):
    """A point at every operator of an optimizer's step."""

    def step(self, optimizer):
        with EveryOperator():
            optimizer.step()


def run(
    path: Path,
    job: Job,
    micro: int,
    fails=None,
    steps=False,
    every=60.0,
    validate=True,
    validation=None,
    saves=print,
    idle_nets="keep",
    optimizer_state="device",
    resumes=False,
    **changed,
):
    """(exit code, everything that was learnt, ids of every window, lines of metrics, points)."""
    points = Spoiled.points = Points(fails)
    plan = Plan(
        job="", settings={}, device="cpu", budget_bytes=1 << 30, unit="samples", global_batch=8, micro_batch=micro,
        micro_batches=[[8]], arithmetic="", engine="single", precision="fp32", seed=5,
        validate_every=None if validate else 0, validation=validation or PhasePolicy(),
        idle_nets=idle_nets,
    )  # fmt: skip
    folder = RunFolder(path)
    folder.open(resume=resumes)
    train_state = build(job, "cpu", SpoiledSteps() if steps else Single(), optimizer_state=optimizer_state)
    train_state.carried = CarriedState(train_state)
    samples = job.dataset()
    windows = Windows(size=len(samples), lengths=None, global_batch=8, micro_batch=micro, seed=5)
    checkpoints = Checkpoints(folder.checkpoints, 2)
    first = resume(train_state, plan, checkpoints, print) if resumes else 0
    saver = Saver(checkpoints=checkpoints, plan=plan, every=every, say=saves)
    given = {
        "plan": plan, "folder": folder, "samples": samples, "lengths": None, "windows": windows, "first": first,
        "last": WINDOWS, "saver": saver,
    }  # fmt: skip
    given["validation"] = validation_data(job)
    code = train(train_state, RunContext(**{**given, **changed}))
    learnt = {f"{n}.{k}": v for n, net in (*train_state.nets.items(), *((f"ema {n}", e) for n, e in
    train_state.ema.items())) for k, v in net.state_dict().items()}  # fmt: skip
    for name, optimizer in train_state.optimizers.items():
        for i, state in enumerate(optimizer.state.values()):
            learnt |= {f"{name} {i} {k}": v for k, v in state.items() if isinstance(v, torch.Tensor)}
    return code, learnt, lines(path, "samples"), lines(path, "metrics"), points


def lines(path: Path, name: str):
    file = path / f"{name}.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def same(state, other):
    """Whether two runs learnt the same, bit for bit."""
    return state.keys() == other.keys() and all(torch.equal(state[name], other[name]) for name in state)
