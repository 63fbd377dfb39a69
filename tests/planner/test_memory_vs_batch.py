"""pytest tests/planner/test_memory_vs_batch.py: the curve reaches from the smallest micro-batch past the plan's own."""

import json
from pathlib import Path

import pytest

from memfit.cli import main
from memfit.planner.memory_vs_batch import sizes_between

LINEAR = f"{Path(__file__).parents[2]}/testing/linear_layer.py:LinearLayer"


def test_sizes_reach_from_the_smallest_to_the_largest():
    assert sizes_between(1, 512, 512) == [1, 5, 23, 108, 512]
    assert sizes_between(1, 512, 64) == [1, 5, 23, 64, 108, 512]
    assert sizes_between(100, 1000, 300) == [100, 200, 300, 600, 1000]
    assert sizes_between(4, 4, 4) == [4]


def test_the_curve_of_a_plan_holds_the_micro_batch_that_the_plan_chooses(capsys):
    with pytest.raises(SystemExit) as left:
        main(
            ["plan", LINEAR, "--device", "rtx4090", "--global-batch", "512", "--micro-batch", "48", "--curve", "--json"]
        )
    assert left.value.code == 0
    answer = json.loads(capsys.readouterr().out)
    kept = [point["micro_batch"] for point in answer["curve"] if point["policy"] == "everything kept"]
    assert kept == [1, 5, 23, 48, 108, 512]
