"""``memfit plan --from-trace``: the options of a traced script as edits."""

import json
from pathlib import Path
from typing import Any

import pytest

from memfit.device.hardware.catalogue import find_device, with_memory
from memfit.errors import InputError
from memfit.script.saved_answer import read_answer_file
from memfit.show.script_options import options_json

OPTIONS = [
    {"name": "free logits", "saves_bytes": 3 << 30, "where": "train.py:9", "write": "del logits", "reason": "kept"},
    {"name": "bf16 autocast", "saves_bytes": 1 << 30, "where": "train.py:7", "write": "with ...", "reason": ""},
    {"name": "free gradients", "saves_bytes": None, "where": "train.py:3", "write": "zero_grad", "reason": ""},
]
ANSWER: dict[str, Any] = {
    "script": "train.py", "device": {"name": "rtx4090", "memory_bytes": None}, "windows": 3, "largest_batch": None,
    "phases": {"train": {"process_bytes": 10 << 30}, "save": {"process_bytes": 2 << 30}}, "options": OPTIONS,
}  # fmt: skip


def written(folder: Path, answer: Any) -> str:
    (folder / "answer.json").write_text(json.dumps(answer))
    return str(folder / "answer.json")


def test_each_option_says_whether_training_fits_with_it(tmp_path: Path) -> None:
    answer = read_answer_file(written(tmp_path, ANSWER))
    small = with_memory(find_device("rtx4090"), 8 << 30)
    assert small.usable_bytes is not None
    values = options_json(answer, small)
    assert values["fits"] is False
    assert [option["fits"] for option in values["options"]] == [small.usable_bytes >= 7 << 30, False, None]


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("no json", "not JSON"), ("{}", "not an answer of memfit trace"), ("[1]", "not an answer of memfit trace"),
        (json.dumps(ANSWER | {"windows": 1}), "no verdict"),
        (json.dumps(ANSWER | {"options": [OPTIONS[0] | {"for_tools": "lightning"}]}), "not an answer of memfit trace"),
        (json.dumps(ANSWER | {"options": [OPTIONS[0] | {"saves_bytes": [3]}]}), "not an answer of memfit trace"),
    ],
)  # fmt: skip
def test_another_file_is_refused(tmp_path: Path, content: str, says: str) -> None:
    (tmp_path / "answer.json").write_text(content)
    with pytest.raises(InputError, match=says):
        read_answer_file(str(tmp_path / "answer.json"))
    with pytest.raises(InputError, match="cannot be read"):
        read_answer_file(str(tmp_path / "missing.json"))
