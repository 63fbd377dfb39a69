"""The gradient noise scale, where it is known exactly; what a run says of it.

python -m pytest tests/train/test_monitor.py
"""

import json

import pytest
import torch
from torch import nn

from memfit.apply.losses import MicroBatch
from memfit.apply.train_state import build
from memfit.apply.window import Guard, run_window
from memfit.cli.run import show_summary
from memfit.job import Job, Loss
from memfit.train.launch.memory_limit import ProcessMemory
from memfit.train.loop.monitor import Monitor
from memfit.train.run_folder import RunFolder
from tests.train.test_reduced_limits import PLAN

WIDTH, SIGNAL = 256, 16.0
"""Gradient of one sample: a vector of squared norm SIGNAL, and noise of variance 1 in each of WIDTH places."""


class Quadratic(Job):
    """Loss |w - x|^2 / 2 with w fixed at distance sqrt(SIGNAL) from the mean of x: noise scale WIDTH / SIGNAL."""

    def nets(self):
        return {"w": nn.Linear(WIDTH, 1, bias=False)}

    def optimizers(self, nets):
        nn.init.constant_(nets["w"].weight, (SIGNAL / WIDTH) ** 0.5)
        return {"sgd": torch.optim.SGD(nets["w"].parameters(), lr=0.0)}

    def loss(self, nets, batch):
        return Loss((nets["w"].weight - batch).square().sum() / 2, len(batch))


@pytest.mark.parametrize(("sizes", "counted"), [((4,) * 8, False), ((4,) * 8, True), ((6, 6, 6, 2), True)])
def test_the_noise_scale_of_a_quadratic_is_its_variance_over_its_squared_gradient(sizes, counted):
    """Over the 19 windows that the decay keeps, the estimate's standard deviation is 5 to 7 %; 25 % is allowed."""
    train_state = build(Quadratic(), "cpu")
    monitor, generator = Monitor(train_state, ProcessMemory()), torch.Generator().manual_seed(0)
    for number in range(60):
        data = [torch.randn(size, WIDTH, generator=generator) for size in sizes]
        parts = [MicroBatch(fetch=lambda x=x: x, padded_units=len(x), units=len(x) if counted else None) for x in data]
        monitor.begin(parts)
        result = run_window(
            train_state, parts, lambda part: monitor.fetches() if part == "fetch" else None, guard=Guard(norms=True)
        )
        monitor.end(result.norms, 0)
        assert (monitor.noise_scale is None) == (number < 4)
    assert monitor.noise_scale == pytest.approx(WIDTH / SIGNAL, rel=0.25)


@pytest.mark.parametrize("known", [17.4, None])
def test_a_run_says_what_its_noise_scale_means(known, tmp_path, capsys):
    folder = RunFolder(tmp_path)
    for number, noise in enumerate([None, known, None]):
        folder.append("metrics", {
            "window": number, "loss": 1.0, "global_batch_asked": 64, "global_batch_done": 64, "seconds": 1.0,
            "predicted_process_bytes": 1 << 20, "measured_process_bytes": 1 << 20, "noise_scale": noise,
        })  # fmt: skip
    folder.close()
    show_summary(folder, PLAN, as_json=True)
    assert json.loads(capsys.readouterr().out)["noise_scale"] == known
    show_summary(folder, PLAN, as_json=False)
    said = " ".join(capsys.readouterr().out.split())
    words = "Noise scale about 17 samples: a global batch far above it wastes samples (McCandlish et al. 2018)."
    assert (words in said) == (known is not None)
    assert ("Noise scale" in said) == (known is not None)


def test_a_run_whose_lines_hold_other_values_has_its_summary(tmp_path, capsys):
    folder = RunFolder(tmp_path / "run")
    folder.open(resume=False)
    other = {"loss": "x", "seconds": [], "measured_process_bytes": "z", "global_batch_done": {}, "noise_scale": "1"}
    right = {"loss": 2.0, "seconds": 1.5, "measured_process_bytes": 1 << 20, "global_batch_done": 8}
    for window, line in enumerate((other, right, right | {"noise_scale": 3.0}, other)):
        folder.append("metrics", {"window": window, **line})
    show_summary(folder, PLAN, as_json=False)
    said = capsys.readouterr().out
    assert "4 windows in 3.0 s, loss unknown to unknown" in said
    assert "Peak 1.0 MiB measured" in said
    show_summary(folder, PLAN, as_json=True)
    summary = json.loads(capsys.readouterr().out)
    assert (summary["loss_first"], summary["noise_scale"], summary["global_batch_done"]) == (None, 3.0, 8)
