"""The units of an epoch are kept while what the data set read is as it was.

python -m pytest tests/planner/test_epoch_units.py
"""

import importlib
import os

import pytest

from memfit.job import Job
from memfit.planner.asked_job import AskedJob
from memfit.planner.dependencies import dependencies, recorded_data
from memfit.planner.epoch_units import EpochUnits


class OfFolder(Job):
    """A data set of a file of lines, and a folder of files; counts how often it is asked."""

    asked = 0

    def __init__(self, folder):
        super().__init__()
        self.folder = folder

    def dataset(self):
        type(self).asked += 1
        return [*(self.folder / "lines.txt").read_text().splitlines(), *os.listdir(self.folder / "clips")]


class Long(OfFolder):
    longest = 1024


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("MEMFIT_KEEP_TRACES", "1")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "another"))
    dependencies({str(tmp_path): ""})
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))  # whose files are no dependencies
    data = tmp_path / "data"
    (data / "clips").mkdir(parents=True)
    (data / "lines.txt").write_text("a\nb\n")
    (data / "clips" / "one.wav").touch()
    OfFolder.asked = 0
    return data


def units(folder) -> int | None:
    """As a process of its own asks."""
    with AskedJob("of folder", lambda: OfFolder(folder), {}) as asked:
        return EpochUnits(asked).answer[0]


def test_the_data_set_is_asked_once_and_again_when_what_it_read_has_changed(folder):
    assert [units(folder), units(folder)] == [3, 3]
    assert OfFolder.asked == 1
    (folder / "clips" / "two.wav").touch()
    assert [units(folder), units(folder)] == [4, 4]
    assert OfFolder.asked == 2
    (folder / "lines.txt").write_text("a\nb\nc\n")
    assert [units(folder), units(folder)] == [5, 5]
    assert OfFolder.asked == 3
    (folder / "other.txt").touch()  # what it did not look at
    assert units(folder) == 5
    assert OfFolder.asked == 3


class CountedMeanwhile(AskedJob):
    """Another process keeps the answer when it is asked for, and has ended then."""

    def loaded_elsewhere(self):
        units(self.folder)


def test_what_another_process_keeps_just_before_it_ends_is_not_counted_again(folder):
    with CountedMeanwhile("of folder", lambda: OfFolder(folder), {}) as asked:
        asked.folder = folder
        assert EpochUnits(asked).answer == (3, "")
    assert OfFolder.asked == 1


def test_its_files_are_no_dependency_of_other_answers(folder):
    with AskedJob("of folder", lambda: OfFolder(folder), {}) as asked:
        assert EpochUnits(asked).answer[0]
        asked.remember("other", 1)
    (folder / "lines.txt").write_text("a\n")
    with AskedJob("of folder", lambda: OfFolder(folder), {}) as asked:
        assert asked.remembered("other") == 1


def test_samples_of_a_length_that_nobody_tells_are_no_units(folder):
    with AskedJob("long", lambda: Long(folder), {}) as asked:
        assert EpochUnits(asked).answer == (None, "the job has a longest, and no lengths() of its samples")


def test_where_it_cannot_be_read_it_is_asked_again(folder):
    (folder / "lines.txt").unlink()
    assert [units(folder), units(folder)] == [None, None]
    assert OfFolder.asked == 2


def test_an_answer_of_very_many_files_is_not_kept(folder, monkeypatch):
    monkeypatch.setattr("memfit.planner.epoch_units.MOST_READS", 1)
    assert [units(folder), units(folder)] == [3, 3]
    assert OfFolder.asked == 2


def test_a_search_for_modules_lists_no_folder_of_data(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "looked_for.py").touch()
    with recorded_data() as data:
        importlib.import_module("looked_for")
        os.listdir(tmp_path.parent)
    assert set(data.folders) == {str(tmp_path.parent)}
