"""memfit beside Lightning: exact accumulation, where Lightning's own last window is wrong, and a watch.

pytest tests/integrations/test_lightning.py
"""

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

lightning = pytest.importorskip("lightning.pytorch")

import memfit  # noqa: E402
from memfit.errors import InputError  # noqa: E402
from memfit.train.probe.probe import probe  # noqa: E402
from tests.accumulation.nets import MESSAGE, Net, mean_loss  # noqa: E402
from tests.train.test_probe import BUDGET, exact, simulated  # noqa: E402


def data(samples: int = 13) -> list[tuple[torch.Tensor, torch.Tensor]]:
    made = torch.Generator().manual_seed(1)
    return [(torch.randn(6, generator=made).double(), torch.randn(1, generator=made).double()) for _ in range(samples)]


class Module(lightning.LightningModule):
    def __init__(self, automatic: bool = True) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = Net()
        self.automatic_optimization = automatic

    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        return mean_loss(self.net, batch)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


def fitted(
    tmp_path: Path, *callbacks: Any, automatic: bool = True, checkpoint: Path | None = None, **options: Any
) -> Module:
    module = Module(automatic)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer = lightning.Trainer(
            max_epochs=2, accumulate_grad_batches=3, callbacks=list(callbacks), accelerator="cpu", devices=1,
            logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
            default_root_dir=tmp_path, **options,
        )  # fmt: skip
        trainer.fit(module, DataLoader(data(), batch_size=2), ckpt_path=checkpoint)
    return module


def reference(clip: float | None = None) -> Net:
    """Windows of three micro-batches of two samples; the last one has one sample."""
    torch.manual_seed(0)
    net, samples = Net(), data()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    for start in (0, 6, 12) * 2:
        window = samples[start : start + 6]
        mean_loss(net, (torch.stack([x for x, _ in window]), torch.stack([y for _, y in window]))).backward()
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(net.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad()
    return net


def difference(a: torch.nn.Module, b: torch.nn.Module) -> float:
    return max(float((p - q).detach().abs().max()) for p, q in zip(a.parameters(), b.parameters(), strict=True))


@pytest.mark.parametrize("clip", [None, 0.05])
def test_windows_are_exact_with_the_callback_and_wrong_without(tmp_path: Path, clip: float | None) -> None:
    exact = fitted(tmp_path, memfit.lightning.ExactAccumulation(), gradient_clip_val=clip)
    assert difference(exact.net, reference(clip)) < 1e-13
    if clip is None:
        assert difference(fitted(tmp_path).net, reference()) > 1e-3


def test_units_that_are_counted_by_a_function(tmp_path: Path) -> None:
    exact = fitted(tmp_path, memfit.lightning.ExactAccumulation(units=lambda batch: len(batch[0])))
    assert difference(exact.net, reference()) < 1e-13


def test_manual_optimization_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="optimizes manually"):
        fitted_manually(tmp_path)


def fitted_manually(tmp_path: Path) -> None:
    callback = memfit.lightning.ExactAccumulation()
    callback.on_fit_start(lightning.Trainer(logger=False, default_root_dir=tmp_path), Module(automatic=False))


def test_the_callback_watches_each_step(tmp_path: Path) -> None:
    fitted(tmp_path, memfit.lightning.WatchCallback(out=tmp_path / "m.jsonl"))
    lines = [json.loads(line) for line in (tmp_path / "m.jsonl").read_text().splitlines()]
    assert [line["window"] for line in lines] == list(range(6))


@pytest.mark.parametrize("mode", ["power", "binsearch"])
def test_the_batch_size_finder_needs_more_trials_than_a_prediction(tmp_path: Path, mode: str) -> None:
    """On a machine that holds 61 samples: Lightning's finder trains on every size that it tries, and ends below."""
    tried: set[int] = set()

    class Limited(Module):
        def __init__(self) -> None:
            super().__init__()
            self.batch_size = 2

        def train_dataloader(self) -> Any:
            return DataLoader(data(512), batch_size=self.batch_size)

        def training_step(self, batch: Any, index: int) -> torch.Tensor:
            tried.add(self.batch_size)
            if exact(self.batch_size) > BUDGET:
                raise torch.OutOfMemoryError(MESSAGE)
            return super().training_step(batch, index)

    finder = lightning.callbacks.BatchSizeFinder(mode=mode, steps_per_trial=1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        lightning.Trainer(
            max_steps=1, callbacks=[finder], accelerator="cpu", devices=1, logger=False, enable_checkpointing=False,
            enable_progress_bar=False, enable_model_summary=False, default_root_dir=tmp_path,
        ).fit(Limited())  # fmt: skip
    prober, ours = simulated(exact)
    assert probe(prober, BUDGET, 1).largest == 61
    assert len(ours) == 2
    assert len(tried) > 5
    assert finder.optimal_batch_size < 61
