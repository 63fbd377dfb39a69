"""Starts a real trainer with what memfit plan --for wrote: planned_trainer.py TOOL PLAN CONFIG.

Prints the peak of the bytes of tensors over its steps, as the profiler saw them.
"""

import json
import os
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from torch.utils.data import DataLoader

from memfit.device.hardware.benchmarks import AllocatorEvents
from memfit.loading import load_job
from memfit.plan import read_plan

STEPS = 2
"""The second one has the optimizer's state."""


def transformers(net: Any, rows: Any, optimizer: Any, config: str) -> None:
    from transformers import HfArgumentParser, Trainer, TrainingArguments

    given = json.loads(Path(config).read_text())
    with TemporaryDirectory() as folder:
        others = {"output_dir": folder, "max_steps": STEPS, "report_to": "none", "save_strategy": "no"}
        (arguments,) = HfArgumentParser(TrainingArguments).parse_dict({**given, **others, "disable_tqdm": True})
        data = [{"input_ids": row, "labels": row} for row in rows]
        Trainer(model=net, args=arguments, train_dataset=data).train()


def lightning(net: Any, rows: Any, optimizer: Any, config: str) -> None:
    import yaml
    from lightning.pytorch import LightningModule, Trainer

    class Module(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = net

        def training_step(self, batch: Any, index: int) -> Any:
            return net(input_ids=batch, labels=batch).loss

        def configure_optimizers(self) -> Any:
            return optimizer

    trainer = Trainer(**yaml.safe_load(Path(config).read_text())["trainer"], max_steps=STEPS, logger=False,
                      enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False)  # fmt: skip
    trainer.fit(Module(), DataLoader(rows, batch_size=micro_batch(sys.argv[2])))


def accelerate(net: Any, rows: Any, optimizer: Any, config: str) -> None:
    from accelerate import Accelerator

    batches = -(-read_plan(sys.argv[2]).global_batch // read_plan(sys.argv[2]).micro_batch)
    accelerator = Accelerator(gradient_accumulation_steps=batches)
    loader = DataLoader(rows, batch_size=micro_batch(sys.argv[2]))
    net, optimizer, loader = accelerator.prepare(net, optimizer, loader)
    for number, batch in enumerate(loader):
        with accelerator.accumulate(net):
            accelerator.backward(net(input_ids=batch, labels=batch).loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(net.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        if number + 1 == STEPS * batches:
            return


def deepspeed(net: Any, rows: Any, optimizer: Any, config: str) -> None:
    from memfit.engine.deepspeed import load

    load()
    from deepspeed import initialize

    engine, *_ = initialize(model=net, optimizer=optimizer, config=config)
    loader = DataLoader(rows, batch_size=engine.train_micro_batch_size_per_gpu())
    for _, batch in zip(range(STEPS * engine.gradient_accumulation_steps()), loader, strict=False):
        engine.backward(engine(input_ids=batch, labels=batch).loss)
        engine.step()
    assert engine.global_steps == STEPS


def micro_batch(plan: str) -> int:
    """Rows of the plan's micro-batch."""
    read = read_plan(plan)
    return read.micro_batch // int(read.settings["longest"])


def main() -> None:
    tool, plan, config = sys.argv[1:]
    job = load_job(read_plan(plan).job, dict(read_plan(plan).settings))
    rows = job.dataset()
    with AllocatorEvents() as events:
        with events.phase("setup"):
            net = job.nets()["llama"]
            optimizer = job.optimizers({"llama": net})["adamw"]
        with events.phase("train"):
            globals()[tool](net, rows, optimizer, config)
    print(json.dumps({"allocated_bytes": events.peaks()["train"].allocated_bytes}))


if __name__ == "__main__":
    main()
    sys.stdout.flush()
    os._exit(0)
