"""memfit export: the real tools are started on what it writes.

python -m pytest tests/cli/test_export.py
"""

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from memfit.loading import load_job
from memfit.plan import Plan, write_plan
from memfit.planner.predict import plain_nets
from memfit.show.export import export
from memfit.show.export_geometry import equal
from testing.ports import free_port
from tests.cli.asking import ROOT, Run, is_one_line

JOB = "tests/verify/jobs.py:Sound"
SCRIPT = f"{ROOT}/tests/cli/exported.py"


def plan(engine: str = "ddp", **changes) -> Plan:
    given = {
        "job": JOB, "settings": {}, "device": "cpu", "budget_bytes": 1 << 28, "unit": "samples", "global_batch": 16,
        "micro_batch": 5, "micro_batches": [[5, 3], [5, 3]], "arithmetic": "16 = 2 devices x (1 x 5 + 3)",
        "engine": engine, "precision": "fp32", "seed": 0,
    }  # fmt: skip
    return Plan(**{**given, **changes})


def exported(made: Plan, to: str):
    job = load_job(made.job, dict(made.settings))
    return export(made, job, plain_nets(job), to, "file", "/plan.toml")


def started(run: Run, made: Plan, to: str, tmp_path: Path, *words: str) -> list[dict]:
    """What each rank printed, in the order of ranks, when the command that export names is run."""
    write_plan(made, tmp_path / "plan.toml")
    code, out, _ = run("export", str(tmp_path / "plan.toml"), "--to", to, "--out", str(tmp_path / "file"), "--json")
    assert code == 0
    command = json.loads(out)["command"].replace("train.py", f"{shlex.quote(SCRIPT)} {to} {' '.join(words)}")
    command = command.replace("deepspeed --num", f"deepspeed --master_port {free_port()} --num")
    command = command.replace("accelerate launch", f"accelerate launch --main_process_port {free_port()}")
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        ["sh", "-c", command], capture_output=True, text=True, cwd=ROOT, env=environment, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    collected = [json.loads(line.partition("GIVEN ")[2]) for line in done.stdout.splitlines() if "GIVEN " in line]
    assert sorted(item["RANK"] for item in collected) == list(range(len(made.micro_batches)))
    return sorted(collected, key=lambda item: item["RANK"])


def test_torchrun_gives_each_rank_its_own_sizes(run, tmp_path):
    rank_0, rank_1 = started(run, plan(micro_batches=[[5, 4], [5, 2]]), "torchrun", tmp_path)
    assert (rank_0["mine"], rank_1["mine"], rank_0["world"]) == ([5, 4], [5, 2], 2)


@pytest.mark.slow
def test_accelerate_starts_as_many_processes(run, tmp_path):
    for rank in started(run, plan(), "accelerate", tmp_path):
        assert (rank["processes"], rank["kind"], rank["precision"]) == (2, "MULTI_CPU", "no")


def test_choices_of_deepspeed_are_those_that_deepspeed_reads():
    from deepspeed.runtime.config import DeepSpeedConfig

    choices = {
        "reduce_bucket_size": 500, "overlap_comm": False, "offload_optimizer": True, "offload_param": True,
        "prefetch_bucket_size": 7, "param_persistence_threshold": 100, "max_live_parameters": 9,
    }  # fmt: skip
    values = json.loads(exported(plan("zero3", engine_choices=choices), "deepspeed").text)
    read = DeepSpeedConfig({**values, "train_batch_size": 8})
    zero = read.zero_config
    assert (zero.reduce_bucket_size, zero.overlap_comm, zero.prefetch_bucket_size) == (500, False, 7)
    assert (zero.param_persistence_threshold, zero.max_live_parameters) == (100, 9)
    assert (zero.offload_optimizer.device, zero.offload_param.device) == ("cpu", "cpu")
    assert read.zero_force_ds_cpu_optimizer is False


def test_choices_that_a_tool_has_no_word_for_are_named():
    choices = {"cpu_offload": True, "half_gather": True}
    accelerate = exported(plan("fsdp2", engine_choices=choices), "accelerate")
    assert "fsdp_offload_params: true" in accelerate.text
    assert accelerate.left_out["engine choices"] == "the plan has half_gather = True"
    trainer = json.loads(exported(plan("fsdp2", engine_choices=choices), "transformers").text)
    assert trainer["fsdp_config"]["cpu_offload"] is True
    titan = exported(plan("fsdp2", engine_choices=choices), "torchtitan")
    assert "--training.enable_cpu_offload \\\n" in titan.text
    assert "engine choices" not in exported(plan("fsdp2", engine_choices=choices), "torchrun").left_out


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["fsdp2", "zero2"])
def test_accelerate_takes_the_plans_sharding(run, engine, tmp_path):
    for rank in started(run, plan(engine, job="testing/nets.py:Transformer"), "accelerate", tmp_path):
        assert rank["processes"] == 2
        if engine == "fsdp2":
            assert (rank["fsdp"], rank["gathered"]) == ("2", "DiTBlock")
        else:
            assert (rank["stage"], rank["accumulation"]) == ("2", "2")


@pytest.mark.slow
def test_deepspeed_reads_batch_accumulation_and_stage(run, tmp_path):
    pytest.importorskip("deepspeed")
    for rank in started(run, plan("zero2"), "deepspeed", tmp_path):
        assert rank["WORLD_SIZE"] == 2
        assert (rank["train_batch_size"], rank["micro_batch"], rank["accumulation"]) == (16, 4, 2)
        assert (rank["stage"], rank["clip"]) == (2, 1.0)


@pytest.mark.parametrize(
    ("sizes", "micro", "expected"),
    [
        ([[5, 3], [5, 3]], 5, (16, 4, 2)),
        ([[7, 7, 7], [7, 7, 7]], 7, (42, 7, 3)),
        ([[5, 1], [5, 1], [5, 0]], 5, (18, 3, 2)),
        ([[4, 4, 4, 1]], 4, (13, 1, 13)),
    ],
)
def test_micro_batches_are_equal_and_none_is_larger_than_planned(sizes, micro, expected):
    made = plan(micro_batches=sizes, micro_batch=micro, global_batch=sum(map(sum, sizes)))
    result = equal(made, load_job(JOB, {}))
    assert (result.global_batch, result.micro_batch, result.accumulation) == expected
    assert result.global_batch == len(sizes) * result.micro_batch * result.accumulation


def test_what_a_tool_cannot_say_is_named_with_the_formula():
    left_out = exported(plan(checkpointing={"net.0": "full"}, implementation="fused"), "deepspeed").left_out
    assert "sum_of_losses / N * 2 * 2" in left_out["normalisation by units"]
    assert "[5, 3]" in left_out["short last micro-batch"]
    assert '"net.0": "full"' in left_out["checkpointing by module"]
    assert "fused" in left_out["optimizer's kernels"]
    assert exported(plan(), "torchrun").left_out["normalisation by units"].count("*") == 1
    even = plan(micro_batches=[[4, 4], [4, 4]], micro_batch=4)
    assert set(exported(even, "deepspeed").left_out) == {"normalisation by units"}
    uneven = plan(micro_batches=[[5, 1], [5, 1], [5, 0]], global_batch=17)
    assert "18 where the plan has 17" in exported(uneven, "deepspeed").left_out["short last micro-batch"]


def test_frames_are_counted_as_whole_micro_batches():
    made = plan(
        job="f5_tts/tiny", unit="frames", global_batch=1500, micro_batch=400, micro_batches=[[400, 350], [400, 350]]
    )
    result = exported(made, "deepspeed")
    assert json.loads(result.text)["train_batch_size"] == 4
    assert "at most 400 frames" in result.left_out["variable length"]
    assert "LengthBatchSampler" in result.left_out["variable length"]


def test_several_optimizers_are_named_for_deepspeed():
    made = plan(job="tests/verify/jobs.py:Unsynchronised")
    assert "'adam', 'judge'" in exported(made, "deepspeed").left_out["several optimizers"]


def test_a_file_that_cannot_be_written_is_one_line(run, tmp_path):
    write_plan(plan(), tmp_path / "plan.toml")
    words = (str(tmp_path / "plan.toml"), "--to", "torchrun", "--out", "/nowhere/x.sh")
    is_one_line(run("export", *words), "cannot be written")


@pytest.mark.parametrize("mesh", [{"tp": 2}, {"ep": 2}, {"pp": 2}, {"dp_shard_in_ep": 2}])
@pytest.mark.parametrize("to", ["slurm", "skypilot"])
def test_files_that_start_memfit_run_take_a_plan_of_every_mesh(to, mesh, tmp_path, run):
    shares = [[5, 5, 5, 1]] if "dp_shard_in_ep" not in mesh else [[5, 3], [5, 3]]
    made = plan("fsdp2", mesh=mesh, micro_batches=shares, arithmetic=f"16 samples on {mesh}")
    write_plan(made, tmp_path / "plan.toml")
    file = tmp_path / "file"
    code, _, err = run("export", str(tmp_path / "plan.toml"), "--to", to, "--nnodes", "2", "--out", str(file), "--json")
    assert code == 0, err
    assert "memfit run " in file.read_text()
    refused = run("export", str(tmp_path / "plan.toml"), "--to", "torchrun", "--out", str(file))
    is_one_line(refused, "run it with memfit run")
