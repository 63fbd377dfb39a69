"""The remedies of Lightning, Accelerate and Transformers beside memfit's, on the same nets, data and limits.

python -m bench.library_remedies [--json F]

- The last window of an accumulation: an epoch of 13 samples in micro-batches of 2 and windows of 3, twice. The figure
  is the largest difference of a weight to windows of one batch each.
- ``auto_find_batch_size``: three windows of two micro-batches of 4 rows; memory runs out in the fourth backward.
  Figures: windows that were begun, and the largest difference of a weight to the undisturbed run.
- ``BatchSizeFinder``: in a process that cannot take more than 48 MiB (RLIMIT_DATA), the sizes that it trains on,
  the one that it finds, and whether two steps of training run with it; beside it the real trials of ``memfit probe``,
  each in a fresh process under that limit.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
os.environ |= {"ACCELERATE_USE_CPU": "true", "CUDA_VISIBLE_DEVICES": ""}

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from bench.result_file import ROOT, add_json_option, target, write_result
from memfit.train.launch import memory_limit

BUDGET = "48MiB"
MESSAGE = "CUDA out of memory. Tried to allocate 2.00 GiB."
QUIET = {
    "accelerator": "cpu", "devices": 1, "logger": False, "enable_checkpointing": False, "enable_progress_bar": False,
    "enable_model_summary": False,
}  # fmt: skip


def samples() -> list[tuple[Tensor, Tensor]]:
    made = torch.Generator().manual_seed(1)
    return [(torch.randn(6, generator=made).double(), torch.randn(1, generator=made).double()) for _ in range(13)]


def small_net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 1)).double()


def loss_of(net: nn.Module, batch: Any) -> Tensor:
    return (net(batch[0]) - batch[1]).square().mean()


def momentum(net: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)


def difference(net: nn.Module, other: nn.Module) -> float:
    return max(float((p - q).detach().abs().max()) for p, q in zip(net.parameters(), other.parameters(), strict=True))


def whole_windows() -> nn.Module:
    """Each window as one batch."""
    net = small_net()
    optimizer, rows = momentum(net), samples()
    for start in (0, 6, 12) * 2:
        loss_of(net, [torch.stack(part) for part in zip(*rows[start : start + 6], strict=True)]).backward()
        optimizer.step()
        optimizer.zero_grad()
    return net


def with_lightning(callbacks: list[Any], folder: str) -> nn.Module:
    import lightning.pytorch as lightning

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = small_net()

        def training_step(self, batch: Any, index: int) -> Tensor:
            return loss_of(self.net, batch)

        def configure_optimizers(self) -> Any:
            return momentum(self.net)

    module = Module()
    options = {**QUIET, "max_epochs": 2, "accumulate_grad_batches": 3, "default_root_dir": folder}
    lightning.Trainer(callbacks=callbacks, **options).fit(module, DataLoader(samples(), batch_size=2))
    return module.net


def with_accelerate(*, ours: bool) -> nn.Module:
    import accelerate

    import memfit

    net = small_net()
    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=1 if ours else 3)
    objects = (net, momentum(net), DataLoader(samples(), batch_size=2))
    if ours:
        model, optimizer, loader, guard = memfit.accelerate.prepare(accelerator, *objects)
        for batches in [window for _ in range(2) for window in memfit.accelerate.windows(loader, 3)]:
            for part in guard.window(batches):
                with part as batch:
                    guard.backward(loss_of(model, batch), len(batch[0]))
            optimizer.step()
            optimizer.zero_grad()
        return net
    model, optimizer, loader = accelerator.prepare(*objects)
    for batch in [batch for _ in range(2) for batch in loader]:
        with accelerator.accumulate(model):
            accelerator.backward(loss_of(model, batch))
            optimizer.step()
            optimizer.zero_grad()
    return net


def last_windows() -> dict[str, float]:
    """Differences to whole windows, by library and callback."""
    import memfit

    whole = whole_windows()
    with tempfile.TemporaryDirectory() as folder:
        return {
            "lightning": difference(with_lightning([], folder), whole),
            "lightning_exact_accumulation": difference(
                with_lightning([memfit.lightning.ExactAccumulation()], folder), whole
            ),
            "accelerate": difference(with_accelerate(ours=False), whole),
            "accelerate_guard": difference(with_accelerate(ours=True), whole),
        }


def decoder() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
            num_key_value_heads=2, max_position_embeddings=8,
        )
    ).double()  # fmt: skip


def with_trainer(net: Any, folder: str, *, mixin: type, fail_at: int | None, find: bool = False) -> dict[str, Any]:
    """A Trainer's run; windows that were begun and the size of its micro-batches."""
    import transformers

    class Own(mixin, transformers.Trainer):  # type: ignore[misc, valid-type]
        pass

    class Begun(transformers.TrainerCallback):
        windows = 0

        def on_step_begin(self, *arguments: Any, **options: Any) -> None:
            Begun.windows += 1

    calls = 0

    def fail(gradient: Tensor) -> None:
        nonlocal calls
        calls += 1
        if calls - 1 == fail_at:
            raise torch.OutOfMemoryError(MESSAGE)

    next(net.parameters()).register_hook(fail)
    made = torch.Generator().manual_seed(0)
    rows = [torch.randint(32, (8,), generator=made) for _ in range(24)]
    trainer = Own(
        model=net,
        args=transformers.TrainingArguments(
            output_dir=folder, per_device_train_batch_size=4, gradient_accumulation_steps=2, max_steps=3,
            learning_rate=0.05, lr_scheduler_type="constant", optim="sgd", use_cpu=True, report_to=[],
            save_strategy="no", disable_tqdm=True, seed=0, data_seed=0, auto_find_batch_size=find,
        ),
        train_dataset=[{"input_ids": ids, "labels": ids} for ids in rows],
        callbacks=[Begun()],
    )  # fmt: skip
    trainer.train()
    return {"windows_begun": Begun.windows, "micro_batch": trainer._train_batch_size}


def failed_steps() -> dict[str, Any]:
    """The Trainer's own remedy and ours after the same failure."""
    import memfit

    class Unchanged:
        pass

    undisturbed, restarted, cut = decoder(), decoder(), decoder()
    with tempfile.TemporaryDirectory() as folder:
        with_trainer(undisturbed, folder, mixin=Unchanged, fail_at=None)
        own = with_trainer(restarted, folder, mixin=Unchanged, fail_at=3, find=True)
        ours = with_trainer(cut, folder, mixin=memfit.transformers.SplitStep, fail_at=3)
    return {
        "auto_find_batch_size": {**own, "difference": difference(restarted, undisturbed)},
        "split_step": {**ours, "difference": difference(cut, undisturbed)},
    }


def finder(mode: str) -> dict[str, Any]:
    """What Lightning's BatchSizeFinder does in this process under the limit."""
    import lightning.pytorch as lightning

    from bench.limited_job import LimitedNet
    from memfit.sizes import parse_size
    from memfit.train.launch.warm_up import warm_torch

    job = LimitedNet()
    tried: list[int] = []

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.batch_size, self.net = 2, job.nets()["net"]

        def train_dataloader(self) -> Any:
            return DataLoader([torch.zeros(job.width)] * (1 << 17), batch_size=self.batch_size)

        def training_step(self, batch: Any, index: int) -> Tensor:
            if not ended.batch_size:
                tried.append(len(batch))
            return self.net(batch).square().mean()

        def configure_optimizers(self) -> Any:
            return job.optimizers({"net": self.net})["adamw"]

    class Ended(lightning.Callback):
        """Stands after the finder."""

        batch_size = 0

        def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
            self.batch_size = pl_module.batch_size

    module, ended = Module(), Ended()
    sizes = lightning.callbacks.BatchSizeFinder(mode=mode, steps_per_trial=1, max_trials=25)
    warm_torch()
    memory_limit.limit(parse_size(BUDGET))
    trains = True
    try:
        with tempfile.TemporaryDirectory() as folder:
            lightning.Trainer(max_steps=2, callbacks=[sizes, ended], **QUIET, default_root_dir=folder).fit(module)
    except RuntimeError as error:
        if not memory_limit.is_memory_failure(error):
            raise
        trains = False
    trials = [size for number, size in enumerate(tried) if number == 0 or tried[number - 1] != size]
    return {"trials": trials, "found": ended.batch_size, "trains_two_steps": trains}


def found_sizes() -> dict[str, Any]:
    """Both modes of the finder and ``memfit probe``, each in processes of its own."""
    environment = {**os.environ, **memory_limit.ENVIRONMENT, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    sizes: dict[str, Any] = {"budget": BUDGET}
    for mode in ("power", "binsearch"):
        command = [sys.executable, "-m", "bench.library_remedies", "--finder", mode]
        done = subprocess.run(command, capture_output=True, text=True, env=environment, check=True, cwd=ROOT)
        sizes[f"batch_size_finder_{mode}"] = json.loads(done.stdout.splitlines()[-1])
    command = [
        sys.executable, "-m", "memfit", "probe", "bench/limited_job.py:LimitedNet", "--memory", BUDGET, "--json",
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False, cwd=ROOT)
    answer = json.loads(done.stdout)
    trials = [trial["micro_batch"] for trial in answer["trials"]]
    sizes["memfit_probe"] = {"trials": trials, "found": answer["found"]}
    return sizes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--finder", choices=("power", "binsearch"), help="only run this finder in this process")
    add_json_option(parser)
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    if arguments.finder:
        print(json.dumps(finder(arguments.finder)))
        return
    figures = {"last_window": last_windows(), "failed_step": failed_steps(), "largest_batch": found_sizes()}
    print(json.dumps(figures, indent=1))
    write_result(target(arguments.json), figures, packages=("lightning", "accelerate", "transformers"))


if __name__ == "__main__":
    main()
