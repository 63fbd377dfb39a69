"""The estimated time of a window, by its micro-batches' sizes.

python -m pytest tests/planner/test_window_seconds.py
"""

from types import SimpleNamespace

import pytest

from memfit.geometry import split
from memfit.planner.search.candidate_search import CandidateSearch
from memfit.planner.timing.pipeline_time import PipelineTime


def made_up_rates(pipeline, communicates):
    """What the arithmetic asks of a search."""
    return SimpleNamespace(
        step_seconds=1.0, pipeline=pipeline, sent_bytes=lambda geometry: 0.0, _communicates=communicates
    )


@pytest.mark.parametrize(
    ("global_batch", "micro_batch", "ranks", "seconds"),
    [
        (12, 4, 1, 3 * 8.0 + 1 + 3 * 0.5),
        (10, 4, 1, 10 / 4 * 8.0 + 1 + 3 * 0.5),
        (11, 5, 2, 6 / 5 * 8.0 + 1 + 2 * 0.5),
    ],
)
def test_a_short_last_micro_batch_takes_its_share_of_a_full_ones_time(global_batch, micro_batch, ranks, seconds):
    """A search's own arithmetic, on rates that are made up: 8 s a micro-batch, 1 s a step, 0.5 s of communication."""
    rates = made_up_rates(PipelineTime(), lambda count, computed: 0.5 * count)
    geometry = split(global_batch, micro_batch, "samples", ranks)
    assert CandidateSearch._window(rates, geometry, 8.0) == pytest.approx(seconds)


def test_stages_wait_for_the_first_and_the_last_micro_batch():
    """1F1B of 3 stages has 2 micro-batches' time in which a stage waits (Narayanan et al. 2021, section 2.2)."""
    rates = made_up_rates(PipelineTime(stages=3), lambda count, computed: 0.0)
    assert CandidateSearch._window(rates, split(12, 4, "samples", 1), 8.0) == pytest.approx(5 * 8.0 + 1)
