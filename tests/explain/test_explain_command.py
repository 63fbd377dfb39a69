"""memfit explain, from the command line.

pytest tests/explain/test_explain_command.py
"""

import io
import json
import pickle
import sys
from pathlib import Path

import pytest

from memfit.cli import main
from memfit.loading import load_job
from memfit.planner.variable_length.sequence import drawn_windows
from tests.explain import samples
from tests.explain.samples import GIB

ROOT = Path(__file__).parents[2]
JOB = f"{ROOT}/examples/language_model.py:LanguageModel"


def ask(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as caught:
        main(["explain", *arguments])
    out, err = capsys.readouterr()
    return int(caught.value.code or 0), out, err


def test_the_verdict_comes_first(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "log").write_text(samples.TRACEBACK + samples.TORCH_2_14)
    code, out, _ = ask(capsys, str(tmp_path / "log"))
    assert code == 0
    assert out.startswith("The process ran out of memory in forward at /home/u/train.py:61")
    assert "Not known from this file" in out


def test_standard_input_as_json(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(samples.TORCH_2_0.encode())))
    code, out, _ = ask(capsys, "-", "--json")
    answer = json.loads(out)
    assert code == 0
    assert answer["failures"][0]["short_bytes"] == GIB
    assert answer["cause"] == "other_processes"


@pytest.mark.parametrize(
    "content", [b"", b"hello\n", b"\x00\x01\x02" * 100, b"\x89PNG\r\n", pickle.dumps(Path("x")), b"{}\n"]
)
def test_what_is_not_known_is_one_line(capsys: pytest.CaptureFixture[str], tmp_path: Path, content: bytes) -> None:
    (tmp_path / "file").write_bytes(content)
    code, out, err = ask(capsys, str(tmp_path / "file"))
    assert (code, out, err.count("\n")) == (2, "", 1)


def test_a_missing_file_and_a_folder(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert ask(capsys, str(tmp_path / "no"))[0] == 2
    assert ask(capsys, str(tmp_path))[0] == 2
    assert ask(capsys, str(tmp_path), "--job", "a", "--script", "b")[0] == 2


@pytest.mark.slow
def test_the_prediction_of_the_same_step_beside_it(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "log").write_text(samples.TORCH_2_14)
    settings = [part for pair in ("layers=2", "width=64", "longest=64") for part in ("--set", pair)]
    code, out, _ = ask(capsys, str(tmp_path / "log"), "--job", JOB, *settings, "--micro-batch", "256", "--json")
    answer = json.loads(out)
    assert code == 0
    prediction = answer["prediction"]
    assert "The prediction differs" in prediction["conclusion"]
    assert "more allocated than that step needs" in prediction["conclusion"]
    compared = {row["name"]: row for row in prediction["compared"]}
    assert compared["allocated"]["measured_bytes"] == 70 * GIB
    assert 0 < compared["allocated"]["predicted_bytes"] < GIB
    halved = [change for change in answer["changes"] if change["name"].startswith("micro-batch 128")]
    assert halved[0]["saves_bytes"] >= 0


VARIED = """
import torch
from torch import nn
import memfit


class Varied(memfit.Job):
    unit, longest = "tokens", 64

    def nets(self):
        return {"net": nn.Sequential(nn.Embedding(100, 32), nn.Linear(32, 100))}

    def optimizers(self, nets):
        return {"sgd": torch.optim.SGD(nets["net"].parameters(), lr=0.1)}

    def batch(self, shape):
        return torch.randint(100, (shape.items, shape.length))

    def loss(self, nets, ids):
        logits = nets["net"](ids).flatten(0, 1)
        return memfit.Loss(nn.functional.cross_entropy(logits, ids.flatten(), reduction="sum"), ids.numel())

    def dataset(self):
        return [torch.zeros(length, dtype=torch.long) for length in self.lengths()]

    def lengths(self):
        return [8 + i % 5 for i in range(60)] + [64]
"""


def test_the_window_of_an_epoch_with_the_largest_micro_batch(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "log").write_text(samples.TORCH_2_14)
    (tmp_path / "job.py").write_text(VARIED)
    asked = (str(tmp_path / "log"), "--job", f"{tmp_path}/job.py:Varied", "--micro-batch", "64", "--device", "t4")
    code, out, _ = ask(capsys, *asked, "--json")
    assert code == 0
    answer = json.loads(out)["prediction"]
    largest = answer["largest_window"]
    drawn = drawn_windows(load_job(f"{tmp_path}/job.py:Varied"), None, global_batch=64, micro_batch=64, count=0)
    units = [max(shape.items * shape.length for shape in window) for window in drawn]
    assert (largest["window"], largest["windows"]) == (units.index(max(units)), len(units))
    assert largest["shape"]["items"] * largest["shape"]["length"] == max(units)
    assert largest["fits"]
    _, out, _ = ask(capsys, *asked)
    assert f"comes in window {largest['window']} of {len(units)} (counted from 0)" in out


def test_a_card_for_which_nothing_is_predicted_is_refused(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "log").write_text(samples.TRACEBACK + samples.TORCH_2_14)
    code, out, err = ask(capsys, str(tmp_path / "log"), "--device", "rtx4090")
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert "--device rtx4090: nothing is predicted" in err
