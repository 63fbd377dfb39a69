"""A net with bf16 weights and no autocast is not called fp32.

python -m pytest tests/show/test_precision_words.py
"""

from pathlib import Path

import pytest

from memfit.cli import main
from memfit.plan import read_plan
from memfit.wording import precision_words

JOB = """
import torch
import memfit


class Half(memfit.Job):
    def nets(self):
        return {"net": torch.nn.Linear(8, 2, dtype=torch.bfloat16)}

    def optimizers(self, nets):
        return {"sgd": torch.optim.SGD(nets["net"].parameters())}

    def batch(self, shape):
        return torch.randn(shape.items, 8, dtype=torch.bfloat16)

    def loss(self, nets, batch):
        return nets["net"](batch).float().square().sum(), len(batch)
"""


@pytest.mark.parametrize(
    ("precision", "net_kind", "words"),
    [
        ("fp32", "attention, bfloat16", "bf16 weights"),
        ("fp32", "matmul, float16, channels last", "fp16 weights"),
        ("fp32", "attention, float32", "fp32"),
        ("fp32", "", "fp32"),
        ("bf16", "attention, bfloat16", "bf16"),
    ],
)
def test_words(precision: str, net_kind: str, words: str) -> None:
    assert precision_words(precision, net_kind) == words


def test_every_view_of_a_plan_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "half.py").write_text(JOB)
    plan = f"{tmp_path}/plan.toml"
    commands = [
        ["plan", f"{tmp_path}/half.py:Half", "--global-batch", "4", "--memory", "64MiB", "--out", plan],
        ["export", plan, "--to", "slurm", "--out", f"{tmp_path}/job.sh"],
        ["export", plan, "--to", "torchrun", "--out", f"{tmp_path}/torchrun.sh"],
        ["report", plan, "--out", f"{tmp_path}/report.html"],
        ["report", "--compare", plan, plan, "--out", f"{tmp_path}/compared.html"],
    ]
    for command in commands:
        with pytest.raises(SystemExit) as ended:
            main(command)
        assert ended.value.code == 0, capsys.readouterr()
    assert read_plan(plan).net_kind == "matmul, bfloat16"
    written = [file.read_text() for file in tmp_path.iterdir() if file.suffix in {".sh", ".html"}]
    texts = [capsys.readouterr().out, *written]
    assert len(texts) == 5
    for text in texts:
        assert "bf16 weights" in text
