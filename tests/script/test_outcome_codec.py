"""What a traced process hands back can be read, and runs nothing when it is.

python -m pytest tests/script/test_outcome_codec.py
"""

import io
import json
import pickle

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from memfit.script.outcome import FileChange, Line, ScriptError, ScriptOutcome
from memfit.script.outcome_codec import AnswerError, read_answer, write_answer


def through(value):
    file = io.BytesIO()
    write_answer(value, file)
    file.seek(0)
    return read_answer(file)


def test_an_outcome_comes_back_as_it_was():
    outcome = ScriptOutcome(
        ended="at its end", windows=3, steps=(("train.py:3", 3),), trace=None, footprint=None,
        peak_bytes={"train": 7}, files=(FileChange(path="/a", bytes=3),),
        error=ScriptError(text="t", summary="s"), row_lines=(Line("a.py", 3, "b"),),
    )  # fmt: skip
    back = through(outcome)
    assert {**vars(back)} == {**vars(outcome)}
    assert through({1: np.arange(3)})[1].tolist() == [0, 1, 2]


class Runs:
    def __reduce__(self):
        return (pytest.fail, ("a pickle was run",))


def test_a_script_that_writes_a_pickle_of_its_own_into_the_answer_runs_nothing():
    for content in (pickle.dumps(Runs()), len(pickle.dumps(Runs())).to_bytes(8, "little") + pickle.dumps(Runs())):
        with pytest.raises(AnswerError):
            read_answer(io.BytesIO(content))
    file = io.BytesIO()
    np.savez(file, tree=np.array([Runs()], dtype=object), allow_pickle=True)
    with pytest.raises(AnswerError):
        read_answer(io.BytesIO(len(file.getvalue()).to_bytes(8, "little") + file.getvalue()))


@pytest.mark.parametrize(
    "tree", [{"kind": "Popen", "fields": {}}, {"kind": "FileChange", "fields": {"x": 1}}, {"a": 1}]
)
def test_only_the_named_dataclasses_are_made(tree):
    file = io.BytesIO()
    np.savez(file, tree=np.array(json.dumps(tree)))
    with pytest.raises(AnswerError):
        read_answer(io.BytesIO(len(file.getvalue()).to_bytes(8, "little") + file.getvalue()))


@given(st.binary(max_size=200))
def test_any_bytes_are_refused(content):
    with pytest.raises(AnswerError):
        read_answer(io.BytesIO(content))
