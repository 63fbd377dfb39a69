"""memfit plan, run, verify and export on stages of a pipeline, resumed on other meshes and on one device; what fails.

python -m pytest tests/train/test_pipeline_runs.py -m slow
"""

import json
from dataclasses import replace

import pytest
import torch

from memfit.installation import release_number
from memfit.mesh import MeshShape
from memfit.plan import read_plan, write_plan
from memfit.torch_compat.pipelining import OLDEST
from memfit.verify.verify_plan import on_ranks
from tests.train.test_mesh_runs import LLAMA, ran, same
from tests.train.test_ranks import ROOT, lines, memfit

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(release_number(torch.__version__) < OLDEST, reason="memfit refuses pp before torch 2.13"),
]
COUNTED = f"{ROOT}/tests/engine/pipeline_jobs.py:Counted"
DECODED = f"{ROOT}/tests/engine/pipeline_jobs.py:Decoded"
DISTURBED = f"{ROOT}/tests/engine/pipeline_jobs.py:Disturbed"
TWO, THREE, BOTH = MeshShape(pp=2), MeshShape(pp=3), MeshShape(pp=2, dp_shard=2)
COPIED, CUT = MeshShape(pp=2, dp_replicate=2), MeshShape(pp=2, tp=2)


def planned(file, job, *arguments):
    made = memfit("plan", job, "--global-batch", 8, "--memory", "256MiB", "--out", file, *arguments)
    assert made.returncode == 0, made.stderr
    return read_plan(file)


def test_a_run_of_stages_learns_what_one_device_does_and_goes_on_on_any_mesh(tmp_path):
    alone = planned(tmp_path / "made.toml", LLAMA, "--micro-batch", 3)
    expected = ran(alone, tmp_path / "alone", "--windows", 5)[0]
    folder = tmp_path / "run"
    _, said = ran(on_ranks(alone, "fsdp2", 2, TWO), folder, "--windows", 1)
    assert "8 = 2 x 3 + 2 on 1 group of 2 devices, fsdp2, mesh pp 2" in said
    ran(on_ranks(alone, "fsdp2", 2), folder, "--windows", 2, "--resume")
    ran(on_ranks(alone, "fsdp2", 3, THREE), folder, "--windows", 3, "--resume")
    ran(on_ranks(alone, "fsdp2", 2, TWO), folder, "--windows", 4, "--resume")
    same(ran(alone, folder, "--windows", 5, "--resume")[0], expected)
    assert [line["global_batch_done"] for line in lines(folder / "run", "metrics")] == [8] * 5
    assert [line["rank"] for line in lines(folder / "run", "samples")] == [0, 0, 1, 0, 0, 0], "stages have one share"


def test_a_run_of_sharded_stages_learns_what_one_device_does_and_goes_on_on_any_mesh(tmp_path):
    alone = planned(tmp_path / "made.toml", LLAMA, "--micro-batch", 3)
    expected = ran(alone, tmp_path / "alone", "--windows", 4)[0]
    folder, both = tmp_path / "run", on_ranks(alone, "fsdp2", 4, BOTH)
    _, said = ran(both, folder, "--windows", 1)
    assert "8 = 2 groups of 2 devices x (1 x 3 + 1), fsdp2, mesh pp 2 x dp_shard 2" in said
    ran(on_ranks(alone, "fsdp2", 2, TWO), folder, "--windows", 2, "--resume")
    ran(both, folder, "--windows", 3, "--resume")
    same(ran(alone, folder, "--windows", 4, "--resume")[0], expected)
    assert [line["global_batch_done"] for line in lines(folder / "run", "metrics")] == [8] * 4
    assert [line["rank"] for line in lines(folder / "run", "samples")] == [0, 1, 0, 0, 1, 0], "shares, not ranks"


@pytest.mark.parametrize("schedule", ["interleaved_1f1b", "interleaved_zero_bubble"])
def test_a_run_of_interleaved_stages_learns_what_one_device_does_and_is_resumed(schedule, tmp_path):
    alone = planned(tmp_path / "made.toml", DISTURBED, "--micro-batch", 3)
    expected, _ = ran(alone, tmp_path / "alone")
    staged = replace(on_ranks(alone, "fsdp2", 2, TWO), engine_choices={"schedule": schedule})
    complete, _ = ran(staged, tmp_path / "whole")
    same(complete, expected)
    ran(staged, tmp_path / "cut", "--windows", 3)
    cut, _ = ran(staged, tmp_path / "cut", "--resume")
    assert all(torch.equal(cut[name], weight) for name, weight in complete.items())
    ran(staged, tmp_path / "other", "--windows", 2)
    ran(on_ranks(alone, "fsdp2", 2, TWO), tmp_path / "other", "--windows", 3, "--resume")
    same(ran(alone, tmp_path / "other", "--resume")[0], expected)


@pytest.mark.parametrize("schedule", ["gpipe", "interleaved_1f1b", "interleaved_zero_bubble"])
def test_a_plan_of_a_schedule_is_run_with_it_and_learns_what_one_device_does(schedule, tmp_path):
    alone = planned(tmp_path / "alone.toml", DISTURBED, "--micro-batch", 3)
    choice = ("--mesh", TWO, "--engine-choice", f"schedule={schedule}")
    staged = planned(tmp_path / "staged.toml", DISTURBED, "--micro-batch", 3, *choice)
    assert staged.engine_choices["schedule"] == schedule
    assert staged.micro_batches == alone.micro_batches
    same(ran(staged, tmp_path / "staged")[0], ran(alone, tmp_path / "alone")[0])


@pytest.mark.parametrize("mesh", [TWO, BOTH, COPIED, CUT], ids=str)
def test_a_run_of_stages_resumes_bit_for_bit_and_validates(mesh, tmp_path):
    staged = on_ranks(planned(tmp_path / "made.toml", DISTURBED, "--micro-batch", 3), "fsdp2", mesh.world, mesh)
    complete, _ = ran(staged, tmp_path / "whole")
    ran(staged, tmp_path / "cut", "--windows", 3)
    cut, _ = ran(staged, tmp_path / "cut", "--resume")
    assert all(torch.equal(cut[name], weight) for name, weight in complete.items())
    whole, resumed = (
        [line["validation"] for line in lines(tmp_path / name / "run", "metrics") if "validation" in line]
        for name in ("whole", "cut")
    )
    assert len(whole) == 2
    assert whole == resumed
    assert whole[1]["loss"] < whole[0]["loss"]


@pytest.mark.parametrize(
    ("fails", "mesh"),
    [("killed", TWO), ("memory", TWO), ("killed", BOTH), ("killed", COPIED), ("killed", CUT)],
    ids=str,
)
def test_a_stage_that_is_killed_or_has_no_memory_lets_all_start_again(fails, mesh, tmp_path):
    staged = on_ranks(planned(tmp_path / "made.toml", DISTURBED, "--micro-batch", 3), "fsdp2", mesh.world, mesh)
    expected, _ = ran(staged, tmp_path / "whole")
    staged.settings.update(fails=fails, failing_rank=mesh.world - 1, mark=str(tmp_path / "failed"))
    gave, said = ran(staged, tmp_path / "torn", "--save-every", 0)
    assert (tmp_path / "failed").exists()
    assert "Traceback" not in said
    if fails == "killed":
        assert all(torch.equal(gave[name], weight) for name, weight in expected.items())
    else:
        assert "out of memory in forward" in said
        same(gave, expected)
    torn = [line["ids"] for line in lines(tmp_path / "torn" / "run", "samples")]
    assert torn == [line["ids"] for line in lines(tmp_path / "whole" / "run", "samples")]


@pytest.mark.parametrize(
    ("job", "mesh"), [(LLAMA, TWO), (COUNTED, THREE), (COUNTED, BOTH), (COUNTED, COPIED), (LLAMA, CUT)], ids=str
)
def test_what_is_planned_for_stages_is_verified_and_not_exported(job, mesh, tmp_path):
    file = tmp_path / "mesh.toml"
    made = planned(file, job, "--mesh", mesh)
    assert (made.engine, made.mesh, made.ranks) == ("fsdp2", mesh.sizes(), mesh.world)
    assert len(made.micro_batches) == mesh.data_ranks
    assert "stages wait for the first and the last micro-batch" in made.reasons["mesh"]
    refused = memfit("export", file, "--to", "torchrun", "--out", tmp_path / "run.sh")
    assert refused.returncode == 2
    assert "stages, share their samples" in refused.stderr
    done = memfit("verify", job, "--mesh", mesh, "--windows", "2", "--json")
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)["worlds"][1]
    assert (answer["mesh"], answer["world"], answer["ok"]) == (str(mesh), mesh.world, True)


def test_a_run_has_the_cut_of_its_plan_and_goes_on_on_another_cut(tmp_path):
    file = tmp_path / "staged.toml"
    made = planned(file, DECODED, "--mesh", TWO, "--micro-batch", 3)
    assert made.engine_choices["first_modules"][0] == "net.embed"
    expected = ran(on_ranks(made, "single", 1), tmp_path / "alone", "--windows", 3)[0]
    moved = replace(made, engine_choices={"first_modules": ["net.embed", "net.ups.1"]})
    whole = ran(moved, tmp_path / "whole", "--windows", 2)[0]
    ran(moved, tmp_path / "cut", "--windows", 1)
    resumed = ran(moved, tmp_path / "cut", "--windows", 2, "--resume")[0]
    assert all(torch.equal(resumed[name], weight) for name, weight in whole.items())
    same(ran(made, tmp_path / "cut", "--windows", 3, "--resume")[0], expected)
    write_plan(moved, file)
    done = memfit("verify", file, "--mesh", TWO, "--windows", "1", "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["worlds"][1]["ok"]
    assert on_ranks(moved, "fsdp2", 3, THREE).engine_choices == {}, "it names the modules of two stages"


def test_a_run_whose_plan_names_no_module_of_the_nets_ends_in_one_line(tmp_path):
    file = tmp_path / "staged.toml"
    made = planned(file, DECODED, "--mesh", TWO, "--micro-batch", 3)
    write_plan(replace(made, engine_choices={"first_modules": ["net.embed", "net.up.1"]}), file)
    refused = memfit("run", file, "--out", tmp_path / "refused")
    assert refused.returncode == 2, refused.stderr
    assert "'net.up.1' is none of the 11 modules that run one after the other; write net.ups.1" in refused.stderr
    assert "Traceback" not in refused.stderr


def test_a_plan_of_stages_recomputes_every_block_where_keeping_does_not_fit(tmp_path):
    for memory, modes in (("24GiB", {}), ("2.7GiB", {f"llama.model.layers.{i}": "full" for i in range(4)})):
        made = memfit(
            "plan", f"{ROOT}/examples/language_model.py:LanguageModel", "--set", "layers=4", "--mesh", TWO,
            "--global-batch", 16384, "--micro-batch", 8192, "--device", "rtx4090", "--memory", memory,
            "--out", tmp_path / "plan.toml",
        )  # fmt: skip
        assert made.returncode == 0, made.stderr
        assert read_plan(tmp_path / "plan.toml").checkpointing == modes


@pytest.mark.parametrize(
    ("mesh", "choices"),
    [
        (TWO, {}),
        (TWO, {"schedule": "interleaved_1f1b"}),
        (TWO, {"schedule": "interleaved_zero_bubble"}),
        (BOTH, {}),
        (COPIED, {}),
        (CUT, {}),
    ],
    ids=str,
)
def test_windows_of_stages_are_verified_during_the_run(mesh, choices, tmp_path):
    staged = on_ranks(planned(tmp_path / "made.toml", DISTURBED, "--micro-batch", 3), "fsdp2", mesh.world, mesh)
    ran(replace(staged, engine_choices=choices), tmp_path / "run", "--windows", 3, "--verify-every", 2)
    proofs = lines(tmp_path / "run" / "run", "verified")
    assert proofs
    assert all(proof["ok"] for proof in proofs)
