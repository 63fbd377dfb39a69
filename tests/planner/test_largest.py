"""The largest size that fits: the next one does not, and both are what ``predict`` says.

python -m pytest tests/planner/test_largest.py
"""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch

from memfit.apply.phase_memory import with_settings
from memfit.cli import main
from memfit.device.hardware.catalogue import find_device, with_memory
from memfit.errors import InputError
from memfit.job import Shape
from memfit.planner import largest
from memfit.planner.asked_job import AskedJob
from memfit.planner.card_comparison import compare_cards
from memfit.planner.largest import by_items, by_setting, largest_of, with_certain
from memfit.planner.predict import checkpoint_all, plain_nets, predict
from memfit.planner.size_search import largest_size
from memfit.trace.interpolation import interpolated
from memfit.trace.step import Tracing, trace_job
from testing.large_nets import Dit
from testing.linear_layer import LinearLayer
from testing.traced_questions import TracedQuestions

JOB = Dit(dim=64, depth=2, heads=4, frames=64)
CARD = with_memory(find_device("rtx4090"), 600 << 20)


@pytest.mark.parametrize(
    "needs",
    [
        lambda size: 100 + 7 * size,
        lambda size: 100 + size * size,
        lambda size: 100 + 64 * (size // 16),
        lambda size: 900 if size < 5 else 900 + 50 * (size - 4),
        lambda size: 2**size,
    ],
)
@pytest.mark.parametrize("limit", [1000, 12345])
def test_the_size_found_fits_and_the_next_one_does_not(needs, limit):
    size, exact = largest_size(needs, limit)
    assert exact
    assert needs(size) <= limit < needs(size + 1)


def test_nothing_fits_where_the_smallest_size_does_not():
    assert largest_size(lambda size: 11 * size, 10) == (None, True)


def test_a_need_that_never_grows_is_not_called_exact():
    size, exact = largest_size(lambda size: 5, 10)
    assert size > 1000
    assert not exact


@pytest.mark.slow
def test_the_largest_micro_batch_is_what_predict_says():
    asked = AskedJob("dit", lambda: JOB)
    keep, recompute = (largest_of(policy, CARD, asked, by_items(None)) for policy in asked.facts.policies[:2])
    assert keep.exact
    assert keep.size < recompute.size
    for answer in (keep, recompute):
        modes = answer.policy.checkpointing
        again = predict(JOB, "dit", Shape(items=answer.size), CARD, checkpointing=modes)
        assert again.footprint == answer.prediction.footprint
        assert again.footprint.fits
        assert not predict(JOB, "dit", Shape(items=answer.size + 1), CARD, checkpointing=modes).footprint.fits


def test_layers_that_a_size_adds_are_recomputed_too():
    """As ``memfit predict --checkpoint all`` does with that setting."""
    asked = AskedJob("dit", lambda: JOB)
    recompute = next(policy for policy in asked.facts.policies if policy.checkpointing)
    answer = largest_of(recompute, with_memory(CARD, 540 << 20), asked, by_setting(asked, "depth", 64))
    deep = with_settings(JOB, {"depth": answer.size})
    modes = checkpoint_all(deep, plain_nets(deep))
    assert len(modes) > len(recompute.checkpointing)
    alone = predict(deep, "dit", answer.prediction.shape, answer.device, checkpointing=modes)
    assert alone.footprint == answer.prediction.footprint


@pytest.mark.parametrize(
    "device", [CARD, find_device("h100"), with_memory(find_device("cpu"), 300 << 20)], ids=["card", "large card", "cpu"]
)
def test_the_whole_interval_of_the_certain_size_fits_and_that_of_the_next_one_does_not(device):
    asked = AskedJob("wide", LinearLayer)
    answer = with_certain(largest_of(asked.facts.policies[0], device, asked, by_items(None)), asked, by_items(None))
    assert answer.prediction.footprint.verdict == "close"
    assert 0 < answer.certain < answer.size
    sizes = (answer.certain, answer.certain + 1)
    verdicts = [asked.predict(Shape(items=size), device).footprint.verdict for size in sizes]
    assert verdicts == ["yes", "close"]


def test_interpolated_traces_lead_to_the_answer_in_a_few_questions():
    """Segments grow in steps of 2 MiB, so that most sizes need what the one before needs."""
    both, alone = AskedJob("wide", LinearLayer), []
    for name in ("rtx3060", "rtx3090"):
        one_card = AskedJob("wide", LinearLayer)
        for asked in (one_card, both):
            answer = largest_of(asked.facts.policies[0], find_device(name), asked, by_items(None))
            assert answer.exact
            assert answer.size > 1_000_000
            assert answer.prediction.footprint.fits
        alone.append(one_card.traced)
    assert max(alone) <= 6, "of sizes up to 2 ** 27, which bisection halves 27 times"
    assert both.traced < sum(alone), "the second card takes traces of the first"


def test_traces_of_other_events_are_not_interpolated():
    low, high = (trace_job(JOB, Shape(items=items), Tracing(device=CARD)) for items in (1, 2))
    assert interpolated(low, replace(high, kind=high.kind[:-1], storage=high.storage[:-1]), 2.0) is None
    third = trace_job(JOB, Shape(items=3), Tracing(device=CARD))
    fifth = trace_job(JOB, Shape(items=5), Tracing(device=CARD))
    assert np.array_equal(interpolated(high, third, 3.0).nbytes, fifth.nbytes)


def test_a_card_with_the_same_facts_is_answered_without_a_trace():
    questions, other = TracedQuestions(), find_device("l40s")
    for device in (CARD, other, find_device("t4")):
        prediction = questions.predict(JOB, "dit", Shape(items=3), device)
        assert prediction.footprint == predict(JOB, "dit", Shape(items=3), device).footprint
    assert questions.traced == 2


class AsksForItsCard(Dit):
    def loss(self, nets, batch):
        torch.cuda.get_device_properties(0)
        return super().loss(nets, batch)


def test_a_job_that_asks_for_its_card_is_traced_for_each():
    questions = TracedQuestions()
    job = AsksForItsCard(dim=64, depth=2, heads=4, frames=64)
    for name in ("rtx4090", "l40s"):
        questions.predict(job, "dit", Shape(items=3), find_device(name))
    assert questions.traced == 2


def test_a_setting_that_is_no_whole_number_is_refused():
    with pytest.raises(InputError, match="no whole-number setting"):
        by_setting(AskedJob("dit", lambda: JOB), "precision", 1)
    changes, shape = by_setting(AskedJob("dit", lambda: JOB), "depth", 2).at(5)
    assert (changes, shape.items) == ({"depth": 5}, 2)


def test_sizes_between_traced_ones_are_those_of_predict_and_need_no_trace():
    asked = AskedJob("dit", lambda: JOB)
    largest_of(asked.facts.policies[0], CARD, asked, by_items(None))
    traced = asked.traced
    for items in (3, 7, 31, 50):
        prediction = asked.predict(Shape(items=items), CARD, checkpointing={}, changes={})
        again = predict(JOB, "dit", Shape(items=items), CARD, checkpointing={})
        assert prediction.footprint == again.footprint
        assert np.allclose(prediction.trace.operator_flops, again.trace.operator_flops, rtol=1e-6)
    assert asked.traced == traced


def test_a_size_that_was_found_for_one_card_is_not_searched_for_again(monkeypatch, tmp_path):
    """``memfit cards`` and ``memfit max`` ask for the same size under other names of the job's policy."""
    monkeypatch.setenv("MEMFIT_KEEP_TRACES", "1")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    questions = AskedJob("dit", lambda: JOB, {})
    (card,) = compare_cards(questions, Shape(items=1), [CARD])
    monkeypatch.setattr(largest, "search_size", None)
    (policy,) = (each for each in questions.facts.policies if each.checkpointing == questions.facts.own)
    assert largest_of(policy, CARD, questions, by_items(None)).size == card.largest


def asked(capsys, *arguments):
    with pytest.raises(SystemExit) as ended:
        main([*arguments, "--json"])
    return ended.value.code, json.loads(capsys.readouterr().out)


def test_the_command_answers_for_each_card_and_policy(capsys):
    code, answer = asked(
        capsys, "max", "testing/large_nets.py:Dit", "--set", "depth=2", "--device", "t4", "--memory", "1GiB"
    )
    assert code == 0
    policies_asked = [result["policy"] for result in answer["results"]]
    assert policies_asked[:2] == ["keep everything", "recompute everything"]
    assert all(result["process_bytes"] <= result["usable_bytes"] == 1 << 30 for result in answer["results"])
    code, answer = asked(capsys, "max", "testing/large_nets.py:Dit", "--device", "t4", "--memory", "10MiB")
    assert code == 3
    assert {result["largest"] for result in answer["results"]} == {None}


def test_a_length_is_refused_where_items_have_none(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["max", "testing/nets.py:Convolution", "--length", "--device", "t4"])
    assert ended.value.code == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_lengths_that_are_not_read_are_said_to_be_assumed(capsys):
    code = "tests.planner.test_largest:Varied"
    for verb, *more in (("predict", "--micro-batch", "6"), ("max",)):
        with pytest.raises(SystemExit) as stop:
            main([verb, code, *more, "--device", "rtx4090"])
        assert stop.value.code == 0
        line = "Assumed: every sample is as long as the longest, 3 units of length; memfit plan reads lengths()."
        assert " ".join(capsys.readouterr().out.split()).count(line) == 1


class Varied(LinearLayer):
    longest = 3

    def lengths(self):
        return [1, 2, 3]
