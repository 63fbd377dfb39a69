"""pytest tests/bench/test_peers.py: what the benchmark of estimators asks of each, and what one without an answer
says."""

from bench.peers import answer_of, by_accelerate, by_memfit
from bench.peers_works import Pictures


def test_a_tool_that_does_not_take_a_kind_of_net_says_so():
    answer = answer_of("U-Net", "fitcheck-llm")
    assert (answer["bytes"], answer["why"]) == (None, "it takes decoders of language alone")


def test_tools_are_asked_about_the_same_step():
    work = Pictures(items=1)
    weights = sum(parameter.numel() for parameter in work.nets()["net"].parameters()) * 4
    assert by_accelerate(work) == 4 * weights
    assert 3 * weights < by_memfit(work) < 8 * weights
