"""Finders of the largest batch beside memfit, on the same net under a real limit, each in a process of its own.

python -m bench.batch_finders [--rounds 2] [--json F]

The net is an MLP under AdamW on this CPU. A process may take ``MEBIBYTES`` more than it has after a step of a tiny net,
which imports what a step imports (RLIMIT_DATA). ``memfit max`` predicts and runs nothing; the others train until memory
runs out. What each finds is then trained in a fresh process under the same limit, memfit's by ``memfit probe`` and the
others' by a loop by hand: does it run? The largest batch that does by hand, to 1 %, comes from trials by doubling and
bisection, each in a fresh process: as Python starts it, and with the settings of glibc's heap that memfit's processes
have (``memfit.train.launch.memory_limit.ENVIRONMENT``).
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import random
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

sys.path.insert(0, str(Path(__file__).parents[1]))

from bench.result_file import ROOT, add_json_option, target, write_result
from memfit import Job, Loss
from memfit.train.launch import memory_limit

MEBIBYTES, WIDTH, LAYERS, MOST = 384, 1024, 4, 16384
"""The limit, the net, and the batch that finders which go down start with."""
STEPS = 3
"""Training steps of a trial."""
Trials = list[tuple[int, bool]]
"""(batch, whether it ran) in the order of the trials."""


class Rows(Dataset[Tensor]):
    """The same row again and again, so that the data set takes no memory."""

    row = torch.zeros(WIDTH)

    def __len__(self) -> int:
        return 4 * MOST * STEPS

    def __getitem__(self, index: int) -> Tensor:
        return self.row


class Mlp(Job):
    """The work as memfit's job."""

    def nets(self) -> dict[str, nn.Module]:
        return {"net": net()}

    def optimizers(self, nets: Any) -> dict[str, torch.optim.Optimizer]:
        return {"adamw": torch.optim.AdamW(nets["net"].parameters())}

    def batch(self, shape: Any) -> Tensor:
        return torch.zeros(shape.items, WIDTH)

    def loss(self, nets: Any, batch: Tensor) -> Loss:
        return Loss(nets["net"](batch).square().sum(), len(batch))


def net() -> nn.Sequential:
    return nn.Sequential(*[nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(LAYERS)])


def limit_memory() -> None:
    """Bounds what this process takes from now on; first imports and starts what any training step does."""
    tiny = nn.Linear(1, 1)
    optimizer = torch.optim.AdamW(tiny.parameters())
    tiny(torch.zeros(1, 1)).sum().backward()
    optimizer.step()
    status = Path("/proc/self/status").read_text().splitlines()
    used = next(int(line.split()[1]) for line in status if line.startswith("VmData:")) << 10
    resource.setrlimit(resource.RLIMIT_DATA, (used + (MEBIBYTES << 20),) * 2)


def by_hand(batch: int, trials: Trials) -> None:
    """Trains a batch as a person's loop does.

    Raises:
        RuntimeError: memory ran out.
    """
    trials.append((batch, False))
    model = net()
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(STEPS):
        model(torch.zeros(batch, WIDTH)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    trials[-1] = (batch, True)


def by_memfit() -> tuple[int | None, Trials]:
    """memfit max on this machine's processor with so much memory: what fits with the whole interval."""
    from memfit.device.hardware.catalogue import find_device, with_memory
    from memfit.planner.asked_job import AskedJob
    from memfit.planner.job_facts import Policy
    from memfit.planner.largest import by_items, largest_of, with_certain

    policy = Policy(name="keep", checkpointing={}, changes={})
    device, asked = with_memory(find_device("cpu"), MEBIBYTES << 20), AskedJob("mlp", Mlp)
    return with_certain(largest_of(policy, device, asked, by_items(None)), asked, by_items(None)).certain, []


def by_probe() -> tuple[int | None, Trials]:
    """memfit probe, whose trials are processes of their own."""
    return probed([])


def probed(options: list[str]) -> tuple[int | None, Trials]:
    """What memfit probe finds or runs."""
    command = [
        sys.executable,
        "-m",
        "memfit",
        "probe",
        "bench/batch_finders.py:Mlp",
        "--memory",
        f"{MEBIBYTES}MiB",
        "--json",
    ]
    done = subprocess.run([*command, *options], cwd=ROOT, capture_output=True, text=True)
    answer = json.loads(done.stdout)
    return answer["found"], [(trial["micro_batch"], trial["ok"]) for trial in answer["trials"]]


def by_lightning(mode: str) -> tuple[int | None, Trials]:
    """Lightning's Tuner.scale_batch_size."""
    import lightning

    trials: Trials = []

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net, self.batch_size = net(), 1

        def train_dataloader(self) -> DataLoader[Tensor]:
            trials.append((self.batch_size, False))
            return DataLoader(Rows(), self.batch_size)

        def training_step(self, rows: Tensor) -> Tensor:
            return self.net(rows).square().mean()

        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            if batch_idx + 1 == STEPS:
                trials[-1] = (self.batch_size, True)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.net.parameters())

    with tempfile.TemporaryDirectory() as folder:
        trainer = lightning.Trainer(
            accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
            enable_model_summary=False, default_root_dir=folder, max_epochs=1,
        )  # fmt: skip
        limit_memory()
        tuner = lightning.pytorch.tuner.Tuner(trainer)
        batch = tuner.scale_batch_size(Module(), mode=mode, steps_per_trial=STEPS, init_val=2)
    return batch, trials


def by_accelerate() -> tuple[int | None, Trials]:
    """Accelerate's find_executable_batch_size."""
    from accelerate.utils import find_executable_batch_size

    trials: Trials = []

    @find_executable_batch_size(starting_batch_size=MOST)
    def train(batch_size: int) -> int:
        by_hand(batch_size, trials)
        return batch_size

    limit_memory()
    return train(), trials  # type: ignore[no-untyped-call]


def by_transformers() -> tuple[int | None, Trials]:
    """Transformers' Trainer with auto_find_batch_size."""
    from transformers import Trainer, TrainingArguments

    trials: Trials = []

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = net()

        def forward(self, rows: Tensor) -> dict[str, Tensor]:
            return {"loss": self.net(rows).square().mean()}

    class Counted(Trainer):
        def get_train_dataloader(self) -> Any:
            trials.append((self._train_batch_size, False))
            return super().get_train_dataloader()

    with tempfile.TemporaryDirectory() as folder:
        asked = TrainingArguments(
            folder, auto_find_batch_size=True, per_device_train_batch_size=MOST, max_steps=STEPS, use_cpu=True,
            report_to=[], save_strategy="no", disable_tqdm=True, remove_unused_columns=False,
        )  # fmt: skip
        trainer = Counted(
            Model(), asked, train_dataset=Rows(), data_collator=lambda rows: {"rows": torch.stack(list(rows))}
        )
        limit_memory()
        trainer.train()
    trials[-1] = (trials[-1][0], True)
    return trials[-1][0], trials


FINDERS: dict[str, tuple[str, Callable[[], tuple[int | None, Trials]]]] = {
    "memfit max, certain": ("memfit", by_memfit),
    "memfit probe": ("memfit", by_probe),
    "Lightning, power": ("lightning", lambda: by_lightning("power")),
    "Lightning, binsearch": ("lightning", lambda: by_lightning("binsearch")),
    "Accelerate's find_executable_batch_size": ("accelerate", by_accelerate),
    "Transformers' auto_find_batch_size": ("transformers", by_transformers),
}
"""(distribution, finder) by name."""


def one(name: str) -> dict[str, Any]:
    """What a finder finds in this process, or how a batch of so many runs."""
    begin, used = time.perf_counter(), _processor()
    answer: dict[str, Any] = {}
    try:
        if name.isdecimal():
            limit_memory()
            trials: Trials = []
            by_hand(int(name), trials)
            answer = {"batch": int(name), "trials": trials}
        else:
            batch, trials = FINDERS[name][1]()
            answer = {"batch": batch, "trials": trials}
    except Exception as error:
        answer = {"batch": None, "trials": [], "why": str(error).strip().splitlines()[0][:120]}
    return answer | {"clock": time.perf_counter() - begin, "processor": _processor() - used}


def _processor() -> float:
    """Seconds of the processor of this process and of those that it waited for."""
    own, others = resource.getrusage(resource.RUSAGE_SELF), resource.getrusage(resource.RUSAGE_CHILDREN)
    return own.ru_utime + own.ru_stime + others.ru_utime + others.ru_stime


def apart(name: str, variables: Mapping[str, str] = {}) -> dict[str, Any]:
    """``one`` in a process of its own, with these variables in its environment too."""
    command = [sys.executable, "-m", "bench.batch_finders", "--one", name]
    environment = {**os.environ, "PYTHONWARNINGS": "ignore", "OMP_NUM_THREADS": "1", **variables}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    if done.returncode:
        why = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1][:120]
        return {"batch": None, "trials": [], "why": why, "clock": 0.0, "processor": 0.0}
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return answer


def bisected(variables: Mapping[str, str]) -> dict[str, Any]:
    """The largest batch that runs, to 1 %, each trial in a fresh process."""
    trials: Trials = []
    clock = processor = 0.0

    def runs(batch: int) -> bool:
        nonlocal clock, processor
        answer = apart(str(batch), variables)
        trials.append((batch, answer["batch"] is not None))
        clock, processor = clock + answer["clock"], processor + answer["processor"]
        return trials[-1][1]

    low, high = 0, 256
    while runs(high):
        low, high = high, 2 * high
    while high - low > max(low // 100, 1):
        middle = (low + high) // 2
        low, high = (middle, high) if runs(middle) else (low, middle)
    return {"batch": low, "trials": trials, "clock": clock, "processor": processor}


def _runs(finder: str, batch: int | None) -> bool | None:
    """Whether what a finder found really runs in a fresh process; None where it found nothing."""
    if batch is None:
        return None
    if finder.startswith("memfit"):
        return probed(["--micro-batch", str(batch)])[0] == batch
    return apart(str(batch))["batch"] is not None


def row_of(finder: str, rounds: list[dict[str, Any]], runs: bool | None) -> dict[str, Any]:
    trials = rounds[0]["trials"]
    seconds = [answer["processor"] for answer in rounds]
    return {
        "finder": finder, "batch": rounds[0]["batch"], "why": rounds[0].get("why", ""), "runs": runs,
        "same_each_round": len({answer["batch"] for answer in rounds}) == 1,
        "trials": len(trials), "failed_trials": sum(not ran for _, ran in trials),
        "processor_seconds": {"least": min(seconds), "median": statistics.median(seconds), "most": max(seconds)},
        "clock_seconds": statistics.median(answer["clock"] for answer in rounds),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--one", metavar="FINDER", help="answer in this process")
    add_json_option(parser)
    options = parser.parse_args()
    if options.one:
        print(json.dumps(one(options.one)))
        return
    chance = random.Random(0)
    answers: dict[str, list[dict[str, Any]]] = {name: [] for name in FINDERS}
    for _ in range(options.rounds):
        for name in chance.sample(list(FINDERS), len(FINDERS)):
            answers[name].append(apart(name))
            print(name, answers[name][-1], flush=True)
    starts: dict[str, dict[str, str]] = {
        "fresh processes": {},
        "with memfit's settings of the heap": memory_limit.ENVIRONMENT,
    }
    rows = [
        row_of(f"doubling and bisection, {start}", [bisected(variables)], runs=True)
        for start, variables in starts.items()
    ]
    for name, rounds in answers.items():
        rows.append(row_of(name, rounds, runs=_runs(name, rounds[0]["batch"])))
    for row in rows:
        print(row, flush=True)
    versions = {name: importlib.metadata.version(distribution) for name, (distribution, _) in FINDERS.items()}
    figures = {"rounds": options.rounds, "mebibytes": MEBIBYTES, "steps": STEPS, "finders": versions, "rows": rows}
    write_result(target(options.json), figures)


if __name__ == "__main__":
    main()
