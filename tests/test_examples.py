"""Every example is traced, planned and really trained, at small sizes.

pytest tests/test_examples.py
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors import safe_open

from memfit.cli import main

ROOT = Path(__file__).parents[1]
SMALL = {
    "language_model.py:LanguageModel": ["layers=2", "width=64", "longest=64"],
    "long_context.py:LongContext": ["layers=2", "width=256", "longest=64"],
    "lora.py:Lora": ["layers=2", "width=64", "longest=64", "rank=4"],
    "llama_lora.py:Llama8B": ["layers=2", "width=512", "vocabulary=256", "longest=64", "rank=4"],
    "unet.py:Discs": ["size=16", "width=16"],
    "gan.py:Waves": ["samples=64"],
}
UNITS = {
    "language_model.py:LanguageModel": 64,
    "long_context.py:LongContext": 64,
    "lora.py:Lora": 64,
    "llama_lora.py:Llama8B": 64,
    "unet.py:Discs": 1,
    "gan.py:Waves": 1,
}
LOSSES = {name: {"loss"} for name in SMALL} | {"gan.py:Waves": {"discriminator", "generator"}}
FILES = {
    "language_model.py:LanguageModel": {"llama"},
    "long_context.py:LongContext": {"llama"},
    "lora.py:Lora": {"llama"},
    "llama_lora.py:Llama8B": {"llama"},
    "unet.py:Discs": {"unet"},
    "gan.py:Waves": {"generator", "discriminator"},
}


def ask(capfd: pytest.CaptureFixture[str], verb: str, name: str, *arguments: str) -> dict:
    settings = [part for pair in SMALL[name] for part in ("--set", pair)]
    with pytest.raises(SystemExit) as caught:
        main([verb, f"{ROOT}/examples/{name}", *settings, *arguments, "--json"])
    out, err = capfd.readouterr()
    assert caught.value.code == 0, err
    return json.loads(out)


def test_every_example_is_here_and_under_40_lines() -> None:
    files = {path.name: len(path.read_text().splitlines()) for path in (ROOT / "examples").glob("*.py")}
    assert set(files) == {name.split(":")[0] for name in SMALL}
    assert max(files.values()) < 40


@pytest.mark.parametrize("name", SMALL)
def test_predicted_for_a_card(capfd: pytest.CaptureFixture[str], name: str) -> None:
    answer = ask(capfd, "predict", name, "--device", "rtx4090", "--micro-batch", str(4 * UNITS[name]))
    train = answer["phases"]["train"]
    assert answer["fits"]
    assert answer["micro_batch"] == 4 * UNITS[name]
    assert 0.9 < sum(train["categories"].values()) / train["allocated_bytes"] <= 1, "the rest is rounding to 512 B"
    assert {net["name"] for net in answer["nets"]} == FILES[name]


def test_lora_trains_its_own_matrices_alone(capfd: pytest.CaptureFixture[str]) -> None:
    """Two matrices (64, 64) in each of two layers get two of (64, 4)."""
    lora = ask(capfd, "predict", "lora.py:Lora", "--device", "rtx4090", "--micro-batch", "64")
    trained = 2 * 2 * 2 * 64 * 4
    assert lora["nets"][0]["trainable"] == trained
    assert lora["phases"]["train"]["categories"]["optimizer"] == 2 * 4 * trained


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.slow] * (name != "gan.py:Waves")) for name in SMALL],
)
def test_trained_really(capfd: pytest.CaptureFixture[str], tmp_path: Path, name: str) -> None:
    unit, plan = UNITS[name], tmp_path / "plan.toml"
    sizes = ["--global-batch", str(5 * unit), "--micro-batch", str(2 * unit), "--memory", "1GiB", "--out", str(plan)]
    planned = ask(capfd, "plan", name, *sizes)
    assert planned["micro_batches"] == [2 * unit, 2 * unit, unit]
    run = [sys.executable, "-m", "memfit", "run", str(plan), "--out", str(tmp_path / "run"), "--windows", "3", "--json"]
    done = subprocess.run(
        run, capture_output=True, text=True, cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"}, check=False
    )
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [line["window"] for line in lines] == [0, 1, 2]
    assert all(line["global_batch_done"] == 5 * unit for line in lines)
    assert all(set(line["losses"]) == LOSSES[name] for line in lines)
    assert len({line["loss"] for line in lines}) == 3
    assert {path.stem for path in (tmp_path / "run" / "final").glob("*.safetensors")} == FILES[name]
    for path in (tmp_path / "run" / "final").glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            assert all(file.get_tensor(key).isfinite().all() for key in file.keys())  # noqa: SIM118
