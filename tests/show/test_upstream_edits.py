"""python -m pytest tests/show/test_upstream_edits.py"""

from dataclasses import replace

import pytest
import torch

from memfit.apply.train_state import ddp_buckets
from memfit.jobs import BUILTIN
from memfit.loading import load_job
from memfit.plan import MemoryOption, Plan
from memfit.planner.predict import checkpoint_all, plain_nets
from memfit.show.upstream_edits import upstream_changes
from testing.nets import Transformer

NEEDED = {"micro_batch", "accumulation", "precision", "checkpointing", "devices", "expandable_allocator"}


def plan_of(name, **changed):
    job = load_job(name)
    values = {
        "job": name, "settings": job.settings(), "device": "rtx4090", "budget_bytes": 1, "unit": job.unit,
        "global_batch": 8, "micro_batch": 2, "micro_batches": [[2, 2, 2, 2]], "arithmetic": "", "engine": "single",
        "precision": job.precision, "seed": 0,
        "checkpointing": checkpoint_all(job, plain_nets(job)) if job.checkpoint == "all" else {},
    }  # fmt: skip
    return job, replace(Plan(**values), **changed)


def written(job, name, plan):
    return {change.option: change.write for change in upstream_changes(job, name, plan)}


@pytest.mark.parametrize("name", BUILTIN)
def test_every_key_is_a_setting_or_a_choice_and_can_be_written(name):
    job = load_job(name)
    assert set(job.upstream) >= NEEDED
    known = {*job.setting_types(), *NEEDED, "engine", "offload_optimizer", "free_gradients"}
    assert {key for key in job.upstream if key not in known and not key.startswith("recompute ")} == set()
    for place in job.upstream.values():
        for text in [place] if isinstance(place, str) else place.values():
            assert not {"{", "}"} & set(text.replace("{value}", "").replace("{variant}", ""))


def test_a_plan_with_accumulation_and_settings():
    job, plan = plan_of("latentsync/stage1")
    settings = plan.settings | {"wrapper": "none", "validation_decode": 4, "optimizer": "fused"}
    option = MemoryOption(name="expandable allocator", applied=True, saves_bytes=1, costs="", reason="")
    plan = replace(plan, settings=settings, options=[option])
    result = written(job, "latentsync/stage1", plan)
    assert result["micro_batch"] == "configs/unet/stage1.yaml: data.batch_size: 2"
    assert "/ 4" in result["accumulation"]
    assert "slices of 4 frames" in result["validation_decode"]
    assert "fused=True" in result["optimizer"]
    assert "expandable_segments" in result["expandable_allocator"]
    chosen = {"micro_batch", "accumulation", "wrapper", "validation_decode", "optimizer", "expandable_allocator"}
    assert set(result) == chosen


def test_checkpointing_is_switched_only_where_the_project_has_it_otherwise():
    job, plan = plan_of("f5_tts/base")
    nets = plain_nets(job)
    assert "checkpointing" not in written(job, "f5_tts/base", plan)
    on = written(job, "f5_tts/base", replace(plan, checkpointing=checkpoint_all(job, nets)))
    assert on["checkpointing"].startswith("src/f5_tts/configs/F5TTS_Base.yaml: model.arch.checkpoint_activations: true")
    some = upstream_changes(job, "f5_tts/base", replace(plan, checkpointing={"dit.transformer_blocks.3": "full"}))
    assert [change.modules for change in some if change.option == "recompute"] == [("dit.transformer_blocks.3",)]


def test_modules_that_the_switch_leaves_alone_have_lines_of_their_own():
    job, plan = plan_of("musetalk/stage1")
    more = {path: "full" for path in job.also_checkpointable(plain_nets(job)) if path.startswith("vae.decoder")}
    changes = upstream_changes(job, "musetalk/stage1", replace(plan, checkpointing=plan.checkpointing | more))
    (option,) = [change for change in changes if change.option == "recompute"]
    assert "vae.enable_gradient_checkpointing()" in option.write
    assert set(option.modules) == set(more)


def test_a_job_without_a_project_says_nothing():
    job = Transformer()
    assert upstream_changes(job, "transformer", plan_of("f5_tts/tiny")[1]) == []


def test_buckets_are_those_of_torch():
    parameters = [torch.nn.Parameter(torch.empty(n)) for n in [1 << 20] * 10 + [1024]]
    backwards = list(reversed(parameters))
    (indices, _) = torch.distributed._compute_bucket_assignment_by_size(backwards, [1 << 20, 25 << 20])
    assert [n for _, n in ddp_buckets(parameters)] == [sum(backwards[i].numel() for i in some) for some in indices]
    assert len(indices) == 3
