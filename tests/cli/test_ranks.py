"""memfit predict for one of many ranks.

python -m pytest tests/cli/test_ranks.py
"""

import json

import pytest

from tests.cli.asking import is_one_line, really

NETS = "testing/nets.py:Transformer"


def predicted(*words):
    return json.loads(really("predict", NETS, "--device", "rtx4090", "--json", *words)[1])


@pytest.fixture(scope="module")
def alone():
    return predicted()


def test_a_thousand_ranks_in_a_minute(alone):
    found = predicted("--engine", "fsdp2", "--world", "1024")
    assert found["seconds"] < 60
    assert (found["engine"], found["world"], found["rank"]) == ("fsdp2", 1024, 0)
    saved, whole = found["phases"]["save"]["categories"], alone["phases"]["save"]["categories"]
    assert saved["optimizer"] < whole["optimizer"] / 50
    assert found["phases"]["train"]["categories"]["communication"] > 0


def test_replicas_hold_everything_and_a_buffer_for_their_gradients(alone):
    found = predicted("--engine", "ddp", "--world", "2", "--rank", "1")
    assert found["rank"] == 1
    assert found["phases"]["save"]["categories"] == alone["phases"]["save"]["categories"]
    process = [
        one["phases"]["train"]["process_bytes"] - one["phases"]["train"]["reserved_bytes"] for one in (found, alone)
    ]
    assert process[0] > process[1], "NCCL's buffers lie outside of the allocator"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--world", "2"], "--engine single has one rank"),
        (["--engine", "ddp", "--world", "2", "--rank", "2"], "there are ranks 0 to 1"),
    ],
)
def test_ranks_that_are_not_there(words, said):
    is_one_line(really("predict", NETS, "--device", "rtx4090", *words), said)
