"""memfit verify: a sound job passes on real ranks, and every planted fault is found and named.

python -m pytest tests/verify
"""

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from memfit.verify.additivity import split_findings
from memfit.verify.bounds import UNIT, gradient_difference, loss_difference, sum_bound, weight_bounds, weight_difference
from tests.verify import jobs

ROOT = Path(__file__).parents[2]
FOUND_ALONE = {
    "Sound": [],
    "Half": [],
    "LocalBatchNorm": [("batch_norm", "fault")],
    "InBatchNegatives": [("in_batch", "fault")],
    "Dropout": [("dropout", "note")],
    "NoiseInTheLoss": [("random_draws", "note")],
    "MeanOfMeans": [("mean_of_means", "fault")],
    "MeanTwice": [("mean_of_means", "fault")],
    "MeanOfValid": [("mean_of_means", "fault")],
    "FixedUnits": [("short_window", "fault")],
    "Hidden": [("changed_in_forward", "fault")],
}
APART, SEVERAL = "'discriminator', 'mouth_discriminator'", "optimizers discriminator, generator"
REFUSED = {
    "musetalk/tiny": {"fsdp2": APART},
    "gpt_sovits/tiny": dict.fromkeys(("zero1", "zero2", "zero3"), SEVERAL),
}
"""What an engine says of a system that it cannot carry."""
BUILT_IN = ("latentsync/tiny", "musetalk/tiny", "f5_tts/tiny", "gpt_sovits/tiny")


def verify(job: str, *arguments: str) -> tuple[int, dict]:
    done = run_verify(job, *arguments)
    assert done.stdout, done.stderr
    return done.returncode, json.loads(done.stdout)


def run_verify(job: str, *arguments: str) -> subprocess.CompletedProcess:
    where = job if "/" in job else f"{ROOT}/tests/verify/jobs.py:{job}"
    return subprocess.run(
        [sys.executable, "-m", "memfit", "verify", where, "--json", *arguments],
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "MEMFIT_COLLECTIVE_SECONDS": "60"},
        timeout=1800,
    )


@pytest.mark.parametrize("name", FOUND_ALONE)
def test_what_a_split_changes_is_found_and_named(name):
    findings = split_findings(getattr(jobs, name)())
    assert [(finding.code, finding.kind) for finding in findings] == FOUND_ALONE[name]


def test_the_module_with_local_statistics_is_named():
    (finding,) = split_findings(jobs.LocalBatchNorm())
    assert "net.1" in finding.text


@pytest.mark.slow
def test_a_sound_job_is_the_same_on_three_ranks_to_rounding():
    code, answer = verify("Sound", "--world-sizes", "1,3")
    assert (code, answer["ok"], answer["findings"]) == (0, True, [])
    first, three = answer["worlds"]
    assert (first["world"], first["engine"], three["world"], three["engine"]) == (1, "single", 3, "ddp")
    assert set(first["max_relative_difference"].values()) == {0.0}
    assert 0 < three["max_relative_difference"]["gradients"] <= three["bound"]
    assert three["bound"] == sum_bound(6)


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["ddp", "fsdp2"])
def test_a_net_that_steps_twice_in_a_window_is_the_same_to_rounding(engine):
    job = f"{ROOT}/tests/train/adversarial_jobs.py:Adversarial"
    code, verified = verify(job, "--world-sizes", "1,2", "--windows", "2", "--engine", engine)
    assert code == 0, verified
    assert not verified["findings"]


def test_sharded_ranks_are_the_same_to_rounding():
    code, answer = verify("Sound", "--world-sizes", "3", "--engine", "fsdp2")
    (three,) = answer["worlds"]
    assert (code, three["engine"], answer["findings"]) == (0, "fsdp2", [])
    assert 0 < three["max_relative_difference"]["gradients"] <= three["bound"] == sum_bound(6)
    assert 0 < three["of_bounds"]["parameters"] <= 1


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["zero1", "zero2", "zero3"])
def test_ranks_under_zero_are_the_same_to_rounding(engine):
    code, answer = verify("Sound", "--world-sizes", "2,3", "--engine", engine)
    assert (code, answer["findings"]) == (0, [])
    for world in answer["worlds"]:
        assert world["engine"] == engine
        assert 0 < world["max_relative_difference"]["gradients"] <= world["bound"]
        assert 0 < world["of_bounds"]["parameters"] <= 1


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["zero1", "zero2", "zero3"])
def test_a_net_that_each_rank_trains_alone_is_carried_under_zero_and_named(engine):
    code, answer = verify("Unsynchronised", "--world-sizes", "2", "--windows", "1", "--engine", engine)
    assert code == 0
    assert [finding["code"] for finding in answer["findings"]] == ["unsynchronised"]
    (two,) = answer["worlds"]
    assert 0 < two["max_relative_difference"]["gradients"] <= two["bound"]


@pytest.mark.parametrize(
    ("name", "engine", "said"),
    [
        ("Sound", "hsdp", "--engine hsdp: no engine of several ranks; write one of ddp, fsdp2, zero1, zero2, zero3"),
        pytest.param("Unsynchronised", "fsdp2", "write --engine ddp", marks=pytest.mark.slow),
    ],
)
def test_an_engine_that_is_not_there_or_cannot_carry_the_job_is_refused_by_name(name, engine, said):
    done = run_verify(name, "--world-sizes", "2", "--windows", "1", "--engine", engine)
    assert (done.returncode, done.stdout) == (2, "")
    assert said in done.stderr.splitlines()[-1]
    assert engine in done.stderr.splitlines()[-1]
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("name", "code", "exit_code"),
    [
        pytest.param("NoiseOfTheRank", "rank_draws", 4, marks=pytest.mark.slow),
        ("Unsynchronised", "unsynchronised", 0),
        pytest.param("OwnGenerator", "rank_draws", 4, marks=pytest.mark.slow),
        pytest.param("Hidden", "unsynchronised", 4, marks=pytest.mark.slow),
        pytest.param("RateOfTheRank", "rank_options", 4, marks=pytest.mark.slow),
        pytest.param("AverageOfTheRank", "unsynchronised", 4, marks=pytest.mark.slow),
        pytest.param("NanOnSeveral", "nan_weights", 4, marks=pytest.mark.slow),
    ],
)
def test_what_ranks_do_otherwise_is_found_and_named(name, code, exit_code):
    returned, answer = verify(name, "--world-sizes", "2", "--windows", "1")
    assert returned == exit_code
    assert code in [finding["code"] for finding in answer["findings"]]
    assert answer["ok"] is (exit_code == 0)


def test_a_loss_that_is_zero_alone_is_not_the_same():
    code, answer = verify("ZeroAlone", "--world-sizes", "2", "--windows", "1")
    assert code == 4
    (two,) = answer["worlds"]
    assert (two["ok"], two["largest_in"]["loss"], two["max_relative_difference"]["loss"]) == (False, "extra", 1.0)


@pytest.mark.parametrize(
    ("name", "engine"),
    [
        ("Half", "fsdp2"),
        pytest.param("Half", "ddp", marks=pytest.mark.slow),
        pytest.param("HalfOfTheRank", "fsdp2", marks=pytest.mark.slow),
    ],
)
def test_nets_in_bf16_are_compared_by_the_rounding_of_bf16(name, engine):
    code, answer = verify(name, "--world-sizes", "2", "--windows", "2", "--engine", engine)
    assert code == (0 if name == "Half" else 4)
    (finding,) = [finding for finding in answer["findings"] if finding["code"] == "coarse_gradients"]
    assert "gradients of 4 parameters are bfloat16" in finding["text"]
    (two,) = answer["worlds"]
    assert (two["of_bounds"]["gradients"] > 2) is (name != "Half")


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["ddp", "fsdp2", "zero1", "zero2", "zero3"])
@pytest.mark.parametrize("name", BUILT_IN)
def test_the_built_in_systems_are_the_same_on_one_two_and_three_ranks(name, engine):
    why = REFUSED.get(name, {}).get(engine)
    if why is not None:
        refused = run_verify(name, "--world-sizes", "2", "--windows", "1", "--engine", engine)
        assert (refused.returncode, refused.stdout) == (2, "")
        assert why in refused.stderr.splitlines()[-1]
        assert "write --engine ddp" in refused.stderr.splitlines()[-1]
        return
    code, answer = verify(name, "--world-sizes", "1,2,3", "--windows", "1", "--engine", engine)
    assert code == 0, answer
    assert [world["ok"] for world in answer["worlds"]] == [True, True, True]


def test_two_orders_of_a_sum_differ_within_the_bound_and_a_wrong_term_does_not():
    parts = torch.randn(16, 1000, generator=torch.Generator().manual_seed(0))
    ours = torch.zeros(1000)
    for part in parts:
        ours += part
    theirs = (parts[:5].sum(0) + parts[5:].sum(0)) + 0.0
    magnitudes = {"net.w": parts.abs().sum(0)}
    right = gradient_difference({"net.w": ours}, {"net.w": theirs}, magnitudes, sum_bound(16))
    wrong = gradient_difference({"net.w": ours}, {"net.w": theirs + 1e-4}, magnitudes, sum_bound(16))
    assert 0 < right.of_bound <= 1
    assert wrong.of_bound > 1


@pytest.mark.parametrize(("theirs", "relative"), [(1.0, 1.0), (math.inf, math.inf), (math.nan, math.inf)])
def test_differences_from_zeros_are_relative_to_the_other_side(theirs, relative):
    zeros, others = {"net.w": torch.zeros(4)}, {"net.w": torch.tensor([0.0, 0.0, theirs, 0.0])}
    gradients = gradient_difference(zeros, others, {}, sum_bound(16))
    weights = weight_difference(zeros, others, {})
    loss = loss_difference("net", 0.0, theirs, 0.0, sum_bound(16))
    assert gradients.relative == weights.relative == loss.relative == relative
    assert loss.of_bound > 1
    assert gradients.of_bound > 1
    assert weights.of_bound > 1


def test_a_zero_gradient_leaves_adam_a_full_step_of_room_and_sgd_none():
    weight = torch.nn.Parameter(torch.ones(1))
    rooms = {}
    for kind in (torch.optim.Adam, torch.optim.SGD):
        optimizer = kind([weight], lr=0.1)
        gradients, magnitudes = {"net.w": torch.zeros(1)}, {"net.w": torch.ones(1)}
        rooms[kind] = float(weight_bounds(optimizer, [["net.w"]], gradients, magnitudes, {"net.w": 1.0}, UNIT)["net.w"])
    assert rooms[torch.optim.Adam] == pytest.approx(0.2, rel=0.2)
    assert rooms[torch.optim.SGD] < 1e-6


def test_muon_which_rounds_a_whole_matrix_to_bf16_has_room_for_it_and_not_for_another_gradient():
    torch.manual_seed(0)
    parts, stepped = torch.randn(4, 256, 256), []
    signs = torch.randint(0, 2, (256, 256)) * 2 - 1
    sums = [parts.sum(0), parts.sum(0) * (1 + 8 * UNIT * signs), parts[:3].sum(0)]
    for gradient in sums:
        weight = torch.nn.Parameter(torch.ones(256, 256))
        optimizer = torch.optim.Muon([weight], lr=0.1)
        known = {"net.w": gradient}, {"net.w": parts.abs().sum(0)}
        room = weight_bounds(optimizer, [["net.w"]], *known, {"net.w": 1.0}, sum_bound(4))["net.w"]
        weight.grad = gradient
        optimizer.step()
        stepped.append(weight.detach())
    assert 0 < (stepped[0] - stepped[1]).abs().max() <= room.min()
    assert (stepped[0] - stepped[2]).abs().max() > 10 * room.max()


def test_a_collective_in_the_loss_does_not_wait_for_ranks_that_run_nothing():
    code, answer = verify("CollectiveInTheLoss", "--world-sizes", "2", "--global-batch", "8", "--micro-batch", "2")
    assert (code, answer["ok"]) == (0, True)


@pytest.mark.slow
def test_ranks_that_run_a_collective_different_numbers_of_times_get_one_line():
    done = run_verify("CollectiveInTheLoss", "--world-sizes", "2", "--global-batch", "5", "--micro-batch", "2")
    assert done.returncode == 2, done.stderr
    assert "the ranks run it different numbers of times" in done.stderr
    assert "Traceback" not in done.stderr
