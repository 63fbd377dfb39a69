"""Nets that normalise over a batch refuse a micro-batch of one item: the planner leaves such splits out.

python -m pytest tests/planner/test_single_items.py
"""

import json

import pytest

from memfit.cli import main
from memfit.plan import read_plan

JOB = """
import torch
from torch import nn
import memfit


class Normalised(memfit.Job):
    unit = "samples"

    def nets(self):
        return {"net": nn.Sequential(nn.Linear(8, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 4))}

    def optimizers(self, nets):
        return {"net": torch.optim.AdamW(nets["net"].parameters())}

    def batch(self, shape):
        return torch.randn(shape.items, 8), torch.randint(4, (shape.items,))

    def loss(self, nets, batch):
        inputs, labels = batch
        return nn.functional.cross_entropy(nets["net"](inputs), labels, reduction="sum"), len(inputs)
"""


def plan(tmp_path, capsys, *arguments):
    (tmp_path / "job.py").write_text(JOB)
    command = ["plan", f"{tmp_path}/job.py:Normalised", "--device", "rtx4090", "--out", f"{tmp_path}/p.toml"]
    with pytest.raises(SystemExit) as ended:
        main([*command, *arguments])
    return ended.value.code, capsys.readouterr()


@pytest.mark.parametrize("global_batch", [7, 8])
def test_no_split_has_a_micro_batch_of_one(tmp_path, capsys, global_batch):
    code, said = plan(tmp_path, capsys, "--global-batch", str(global_batch), "--json")
    assert code == 0
    answer = json.loads(said.out)
    assert min(map(min, read_plan(tmp_path / "p.toml").micro_batches)) > 1
    assert "splits with a micro-batch of 1 are left out" in answer["reasons"]["micro_batch"]


def test_a_last_micro_batch_of_one_is_refused_before_the_run(tmp_path, capsys):
    code, said = plan(tmp_path, capsys, "--global-batch", "7", "--micro-batch", "2")
    assert code == 2
    assert "the nets refuse one item" in said.err
    assert "so that every micro-batch holds two or more" in said.err
    assert not (tmp_path / "p.toml").exists()
