"""predict --epoch and --shapes.

python -m pytest tests/cli/test_sequence.py
"""

import json

import pytest
from click.testing import CliRunner

from memfit.cli.predict import command
from memfit.errors import Exit, InputError
from memfit.job import Shape
from memfit.planner.variable_length.sequence import drawn_windows, read_shapes
from testing.nets import Transformer

JOB = "testing/nets.py:Transformer"


def ask(*options):
    done = CliRunner().invoke(command, [JOB, "--set", "depth=1", *options], standalone_mode=False)
    return done


def test_shapes_are_replayed_one_after_the_other(tmp_path):
    (tmp_path / "shapes.txt").write_text("8x64\n2x256\n\n8x64\n")
    done = ask("--device", "t4", "--micro-batch", "512", "--shapes", str(tmp_path / "shapes.txt"), "--json")
    assert done.exception is None, done.stderr
    answer = json.loads(done.stdout)["sequence"]
    assert (answer["windows"], answer["distinct_shapes"], answer["fits"]) == (3, 2, True)
    assert answer["allocated_bytes"] <= answer["reserved_bytes"]
    assert answer["ratio"] == pytest.approx(answer["reserved_bytes"] / answer["allocated_bytes"])
    assert answer["growth"][-1][1] == answer["reserved_bytes"]
    assert answer["expandable_segments"]["windows"] == 3
    assert done.return_value == Exit.DONE


def test_a_windows_shapes_are_those_that_run_would_draw(tmp_path):
    (tmp_path / "data.csv").write_text("frames\n" + "\n".join(["64", "32", "48", "16"] * 4))
    lengths = [64, 32, 48, 16] * 4
    windows = drawn_windows(Transformer(), lengths, global_batch=128, micro_batch=64, count=0)
    assert sum(shape.items for window in windows for shape in window) == 16
    assert all(shape.units <= 64 for window in windows for shape in window)
    assert all(sum(shape.units for shape in window) <= 128 for window in windows)


@pytest.mark.parametrize("text", ["", "8x", "0x4", "8x4x2", "a"])
def test_a_file_without_windows_is_refused(tmp_path, text):
    (tmp_path / "shapes.txt").write_text(text)
    with pytest.raises(InputError, match=r"shapes\.txt"):
        read_shapes(tmp_path / "shapes.txt")


def test_a_file_that_cannot_be_read_says_why(tmp_path):
    with pytest.raises(InputError, match="No such file or directory"):
        read_shapes(tmp_path / "shapes.txt")
    (tmp_path / "shapes.txt").write_bytes(b"\xff\xfe8x64")
    with pytest.raises(InputError, match="not text"):
        read_shapes(tmp_path / "shapes.txt")


def test_windows_of_several_micro_batches(tmp_path):
    (tmp_path / "shapes.txt").write_text("8x64 2x9\n3\n")
    assert read_shapes(tmp_path / "shapes.txt") == [
        (Shape(items=8, length=64), Shape(items=2, length=9)),
        (Shape(items=3),),
    ]


@pytest.mark.parametrize(
    ("options", "seen"),
    [
        (["--device", "cpu", "--memory", "1GiB", "--shapes", "shapes.txt"], "a sequence on cpu"),
        (["--device", "t4", "--shapes", "shapes.txt", "--epoch", "3"], "--shapes with --epoch"),
        (["--device", "t4", "--shapes", "items.txt"], "shape 3"),
    ],
)
def test_what_cannot_be_replayed_is_refused(tmp_path, monkeypatch, options, seen):
    (tmp_path / "shapes.txt").write_text("2x64\n")
    (tmp_path / "items.txt").write_text("3\n")
    done = ask(
        "--micro-batch", "64", *[str(tmp_path / option) if option.endswith(".txt") else option for option in options]
    )
    assert isinstance(done.exception, InputError)
    assert str(done.exception).startswith(seen)


@pytest.mark.parametrize("epoch", ["1000001", "2147483647"])
def test_more_windows_than_are_replayed_are_refused(tmp_path, epoch):
    (tmp_path / "data.csv").write_text("frames\n64\n32\n")
    lengths = f"{tmp_path}/data.csv:frames"
    done = ask("--device", "t4", "--micro-batch", "512", "--epoch", epoch, "--lengths", lengths)
    assert isinstance(done.exception, InputError)
    assert str(done.exception).startswith(f"--epoch {epoch}: ")
    assert str(done.exception).endswith("write --epoch 1000000, or fewer")
