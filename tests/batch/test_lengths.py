"""pytest tests/batch/test_lengths.py"""

import json

import numpy as np
import pytest
import soundfile

from memfit.batch import as_lengths, audio_lengths, column_lengths
from memfit.errors import InputError


def test_whole_numbers_stay_whole_and_real_ones_real() -> None:
    assert as_lengths([3, 4]).dtype == np.int64
    assert as_lengths([0.5, 4]).dtype == np.float64


@pytest.mark.parametrize(("lengths", "said"), [
    ([3, 0, 4], "sample 1: its length is 0"),
    ([1.0, 2.0, float("nan")], "sample 2: its length is nan"),
    ([[1, 2]], r"lengths of shape \(1, 2\)"),
    (["a"], "not numbers"),
])  # fmt: skip
def test_what_is_no_length_is_named(lengths, said) -> None:
    with pytest.raises(InputError, match=said):
        as_lengths(lengths)


def test_a_column_of_a_table(tmp_path) -> None:
    (tmp_path / "a.csv").write_text("name,frames\nx,30\ny,12\n")
    (tmp_path / "a.tsv").write_text("name\tseconds\nx\t0.5\n")
    (tmp_path / "a.jsonl").write_text('{"frames": 7}\n\n{"frames": 8}\n')
    assert column_lengths(tmp_path / "a.csv", "frames").tolist() == [30, 12]
    assert column_lengths(tmp_path / "a.tsv", "seconds").tolist() == [0.5]
    assert column_lengths(tmp_path / "a.jsonl", "frames").tolist() == [7, 8]
    with pytest.raises(InputError, match="no column 'length'; write one of its columns: name, frames"):
        column_lengths(tmp_path / "a.csv", "length")
    with pytest.raises(InputError, match="name is 'x'"):
        column_lengths(tmp_path / "a.csv", "name")


def test_audio_headers_are_read_once_and_kept(tmp_path, monkeypatch) -> None:
    files = []
    for number, (samples, rate) in enumerate([(24_000, 24_000), (16_000, 16_000), (2560, 24_000)]):
        files.append(tmp_path / f"{number}.wav")
        soundfile.write(files[-1], np.zeros(samples), rate)
    cache = tmp_path / "lengths.json"
    assert audio_lengths(files, rate=24_000, hop=256, cache=cache, progress=False).tolist() == [93, 93, 10]
    assert audio_lengths(files, progress=False).tolist() == [24_000, 16_000, 2560]
    assert len(json.loads(cache.read_text())) == 3
    monkeypatch.setattr(soundfile, "info", None)
    assert audio_lengths(files, cache=cache, progress=False).tolist() == [24_000, 16_000, 2560]
    assert list(tmp_path.glob("lengths.json.*")) == []


def test_a_file_that_is_no_audio_is_named(tmp_path) -> None:
    (tmp_path / "a.wav").write_text("no")
    with pytest.raises(InputError, match=r"a\.wav: not readable audio"):
        audio_lengths([tmp_path / "a.wav"], progress=False)
    with pytest.raises(InputError, match=r"b\.wav: no such file"):
        audio_lengths([tmp_path / "b.wav"], progress=False)


@pytest.mark.parametrize(("name", "text"), [("a.csv", "frames,name\r\n7,x\r\n"), ("a.jsonl", '{"frames": 7}\n')])
def test_a_table_that_a_spreadsheet_wrote_begins_with_a_mark(tmp_path, name, text):
    (tmp_path / name).write_text(text, encoding="utf-8-sig")
    assert column_lengths(tmp_path / name, "frames").tolist() == [7]
