"""The five examples beside a framework: each survives a real allocation failure, and all end with the same weights.

pytest tests/integrations/test_examples.py
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from memfit.train.launch import memory_limit
from testing.ports import free_port

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples" / "beside"
NAMES = ("plain", "accelerate_loop", "lightning_module", "transformers_trainer", "deepspeed_engine")
LIBRARIES = {"accelerate_loop": "accelerate", "lightning_module": "lightning", "deepspeed_engine": "deepspeed"}
ROUNDING = 1e-6
"""AdamW moves a weight by about 6e-3 in six steps; float32 rounding of another split moves it by less than this."""


def trained(name: str, folder: Path, failure: int) -> dict[str, Any]:
    """The weights of both runs, and what was raised in the disturbed one."""
    pytest.importorskip(LIBRARIES.get(name, "transformers"))
    script = str(Path(__file__).with_name("example_run.py"))
    ranks = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    own = {**ranks, "MASTER_PORT": str(free_port())} if name == "deepspeed_engine" else {}
    environment = {**os.environ, **memory_limit.ENVIRONMENT, **own, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, script, name, str(folder), str(failure)],
        capture_output=True, text=True, env=environment, check=False, timeout=240, cwd=folder,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    weights = {each: torch.load(folder / f"{each}.pt") for each in ("undisturbed", "disturbed")}
    return {**json.loads(done.stdout.splitlines()[-1]), **weights}


def difference(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
    assert a.keys() == b.keys()
    return max(float((a[key] - b[key]).abs().max()) for key in a)


def begin() -> dict[str, torch.Tensor]:
    """The decoder's weights before the training."""
    sys.path.insert(0, str(EXAMPLES))
    try:
        from fine_tuning import decoder
    finally:
        sys.path.remove(str(EXAMPLES))
    return decoder().state_dict()


def check(run: dict[str, Any]) -> None:
    (message,) = run["raised"]
    assert "can't allocate memory" in message
    assert difference(run["undisturbed"], run["disturbed"]) < ROUNDING
    assert difference(run["undisturbed"], begin()) > 1e-3


def test_a_plain_loop_survives_a_failure(tmp_path: Path) -> None:
    check(trained("plain", tmp_path, 4))


@pytest.mark.slow
def test_every_framework_survives_a_failure_and_ends_with_the_weights_of_the_plain_loop(tmp_path: Path) -> None:
    runs = {}
    for name in NAMES:
        (tmp_path / name).mkdir()
        runs[name] = trained(name, tmp_path / name, 4)
        check(runs[name])
    for run in runs.values():
        assert difference(run["undisturbed"], runs["plain"]["undisturbed"]) < ROUNDING


def test_at_most_five_lines_of_each_example_are_memfits_and_all_are_marked() -> None:
    scripts = {path.stem: path.read_text().splitlines() for path in EXAMPLES.glob("*.py")}
    assert set(scripts) == {*NAMES, "fine_tuning"}
    assert not any("# memfit" in line for line in scripts["fine_tuning"])
    for name in NAMES:
        marked = [line for line in scripts[name] if line.endswith("# memfit")]
        assert 1 <= len(marked) <= 5, name
        unmarked = set(scripts[name]) - set(marked) - {"import memfit"}
        assert not [line for line in unmarked if "memfit." in line or "guard" in line], name
