"""Where a job first reads what another one has otherwise.

python -m pytest tests/planner/test_first_reads.py
"""

from functools import cached_property

import pytest

from memfit.apply.phase_memory import with_settings
from memfit.planner.search.first_reads import watched_first_reads
from tests.planner.test_options import Deep


class Read(Deep):
    parts: int = 1
    place: str = "device"

    @cached_property
    def doubled(self):
        return 2 * self.parts


@pytest.fixture
def job():
    return Read()


def changed(job, **settings):
    return {name: with_settings(job, {name: value}) for name, value in settings.items()}


def test_each_is_told_once_and_where_it_is_first_read(job):
    read = []
    with watched_first_reads(job, changed(job, parts=2, place="host"), read.append):
        assert (job.unit, read) == (Read.unit, [])
        assert (job.parts, read) == (1, ["parts"])
        assert (job.parts, job.place, read) == (1, "device", ["parts", "place"])
        assert job.place == "device"
    assert read == ["parts", "place"]
    assert type(job) is Read
    assert vars(job) == {}


def test_a_setting_of_the_same_value_is_not_told_of(job):
    read = []
    with watched_first_reads(job, changed(job, parts=1), read.append):
        assert (job.parts, job.place) == (1, "device")
    assert read == []


@pytest.mark.parametrize("ask", [vars, lambda job: job.settings(), lambda job: job.doubled])
def test_what_reads_them_another_way_is_seen(job, ask):
    read = []
    with watched_first_reads(job, changed(job, parts=2), read.append):
        ask(job)
    assert read == ["parts"]


def test_a_copy_becomes_the_other_job_and_keeps_what_was_written(job):
    job.seen, job.own = 1, "own"
    with watched_first_reads(job, changed(job, parts=2, place="host"), lambda name: name == "parts"):
        job.seen, job.noted = 5, "noted"
        assert job.place == "device"
        assert (job.parts, job.doubled) == (2, 4)
        assert (job.seen, job.noted, job.place) == (5, "noted", "device")
        assert not hasattr(job, "own")  # the other job is a fresh one
    assert type(job) is Read
    assert job.parts == 2


def test_the_class_looks_as_it_did(job):
    with watched_first_reads(job, changed(job, parts=2), lambda name: False):
        assert isinstance(job, Read)
        assert (type(job).__name__, type(job).__module__) == ("Read", __name__)
        assert type(job).parts == 1
        assert not type(Read()).__dict__.keys() & {"__getattribute__"}


def test_a_class_that_cannot_be_watched_is_not(job):
    class Fixed(Read):
        def __init_subclass__(cls, **keywords):
            raise TypeError("no class derives from this one")

    read, fixed = [], Fixed()
    with watched_first_reads(fixed, changed(fixed, parts=2), read.append):
        assert fixed.parts == 1
    assert read == []
