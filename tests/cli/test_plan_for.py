"""memfit plan --for: each real trainer is started with what it writes, and takes the bytes that the plan predicts.

pytest tests/cli/test_plan_for.py
"""

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

from memfit.loading import load_job
from memfit.plan import read_plan
from memfit.planner.predict import plain_nets
from memfit.script.titan.target import DEGREES
from memfit.show.export import export
from testing.ports import free_port
from tests.cli.asking import ROOT, Run, is_one_line
from tests.cli.test_export import plan

JOB = """
import torch
from transformers import LlamaConfig, LlamaForCausalLM
import memfit

class LM(memfit.Job):
    unit, longest, clip = "tokens", 64, 1.0
    def nets(self):
        sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
        return {"llama": LlamaForCausalLM(LlamaConfig(vocab_size=256, use_cache=False, **sizes))}
    def optimizers(self, nets):
        return {"adamw": torch.optim.AdamW(nets["llama"].parameters(), lr=1e-3)}
    def batch(self, shape):
        return torch.randint(256, (shape.items, shape.length))
    def loss(self, nets, tokens):
        units = tokens.numel() - len(tokens)
        return memfit.Loss(nets["llama"](input_ids=tokens, labels=tokens).loss * units, units)
    def dataset(self):
        return torch.randint(256, (96, 64))
    def lengths(self):
        return [64] * 96
"""
TOOLS = ("transformers", "lightning", "accelerate", "deepspeed")
BEYOND = 0.04
"""How far a trainer may be from the prediction: some hold the next micro-batches' rows or a buffer of their own."""


def planned(run: Run, folder: Path, tool: str) -> dict[str, Any]:
    (folder / "lm.py").write_text(JOB)
    sizes = ["--global-batch", "1536", "--micro-batch", "512", "--memory", "64MiB"]
    code, out, error = run(
        "plan", str(folder / "lm.py:LM"), *sizes, "--for", tool, "--out", str(folder / "plan.toml"), "--json"
    )
    assert code == 0, error
    answer: dict[str, Any] = json.loads(out)["for"]
    return answer


@pytest.mark.slow
@pytest.mark.parametrize("tool", TOOLS)
def test_a_real_trainer_takes_what_the_plan_predicts(run: Run, tool: str, tmp_path: Path) -> None:
    pytest.importorskip(tool)
    answer = planned(run, tmp_path, tool)
    config = tmp_path / f"config.{'json' if tool in ('transformers', 'deepspeed') else 'yaml'}"
    config.write_text(answer["text"])
    script = [str(Path(__file__).with_name("planned_trainer.py")), tool, str(tmp_path / "plan.toml"), str(config)]
    start = [sys.executable]
    if tool == "accelerate":
        start += [
            "-m",
            "accelerate.commands.launch",
            "--config_file",
            str(config),
            "--main_process_port",
            str(free_port()),
        ]
    ranks = {
        "RANK": "0",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
    }
    own = {"DS_ACCELERATOR": "cpu", **(ranks if tool == "deepspeed" else {})}
    environment = {**os.environ, **own, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run([*start, *script], capture_output=True, text=True, env=environment, check=False, timeout=240)
    assert done.returncode == 0, done.stderr[-3000:]
    measured = json.loads(done.stdout.splitlines()[-1])["allocated_bytes"]
    assert measured == pytest.approx(answer["predicted_bytes"], rel=BEYOND)


def text_of(tool: str, **changes: Any) -> Any:
    made = plan(micro_batches=[[4, 4], [4, 4]], micro_batch=4, **changes)
    job = load_job(made.job, dict(made.settings))
    return export(made, job, plain_nets(job), tool, "file", "/plan.toml")


@pytest.mark.parametrize(
    ("tool", "engine", "words"),
    [
        ("lightning", "ddp", ['strategy: "ddp"', "accumulate_grad_batches: 2", "gradient_clip_val: 1.0", "devices: 2"]),
        ("lightning", "zero2", ['strategy: "deepspeed_stage_2"']),
        ("lightning", "fsdp2", ['strategy: "fsdp"', "# - engine: strategy fsdp is FSDP1"]),
        (
            "transformers",
            "ddp",
            ['"per_device_train_batch_size": 4', '"max_grad_norm": 1.0'],
        ),
        ("transformers", "zero3", ['"stage": 3', '"gradient_accumulation_steps": 2']),
        ("transformers", "fsdp2", ['"fsdp": true', '"version": 2']),
        (
            "torchtitan",
            "ddp",
            ["data_parallel_replicate_degree 2", "global_batch_size 16", "max_norm 1"],
        ),
        ("torchtitan", "fsdp2", ["data_parallel_replicate_degree 1", "shard_degree 2", "activation-checkpoint:none"]),
        ("torchtitan", "zero2", ["# - engine: zero2 became FSDP2"]),
    ],
)
def test_the_plan_is_said_in_the_trainers_words(tool: str, engine: str, words: list[str]) -> None:
    text = text_of(tool, engine=engine).text
    assert [word for word in words if word not in text] == []


def test_what_a_trainer_cannot_say_is_named() -> None:
    parts = {"checkpointing": {"net.0": "full"}, "precision": "fp16", "implementation": "fused"}
    kept = {"checkpointing by module", "optimizer's kernels"}
    assert kept | {"precision", "rows"} <= set(text_of("torchtitan", **parts).left_out)
    assert kept | {"micro-batch"} <= set(text_of("lightning", **parts).left_out)
    assert "checkpointing by module" in text_of("transformers", **parts).left_out
    several = text_of("lightning", job="tests/verify/jobs.py:Unsynchronised")
    assert "accumulate_grad_batches" not in several.text, "Lightning refuses it beside manual optimization"
    assert "automatic_optimization = False" in several.left_out["several optimizers"]


OPTIMIZERS = """
    import torch
    from tests.verify.jobs import Sound

    class Tuned(Sound):
        def optimizers(self, nets):
            weights = nets["net"].parameters()
            return {"adamw": torch.optim.AdamW(weights, lr=3e-4, betas=(0.8, 0.95), eps=1e-6, weight_decay=0.07)}

        def schedules(self, optimizers, windows):
            return {"step": torch.optim.lr_scheduler.StepLR(optimizers["adamw"], 2)}

    class Heavy(Sound):
        def optimizers(self, nets):
            return {"sgd": torch.optim.SGD(nets["net"].parameters(), lr=0.5, momentum=0.9)}
"""


def test_the_trainer_steps_with_the_jobs_rate(tmp_path: Path) -> None:
    """Its own are 5e-5, which falls to 0, and no decay."""
    (tmp_path / "tuned.py").write_text(textwrap.dedent(OPTIMIZERS))
    tuned, heavy = (text_of("transformers", job=f"{tmp_path / 'tuned.py'}:{name}") for name in ("Tuned", "Heavy"))
    values = json.loads(tuned.text)
    names = ("learning_rate", "weight_decay", "adam_beta1", "adam_beta2", "adam_epsilon", "lr_scheduler_type")
    assert [values[name] for name in names] == [3e-4, 0.07, 0.8, 0.95, 1e-6, "constant"]
    assert "decay of biases and norms" in tuned.left_out["optimizer"]
    assert "Tuned.schedules()" in tuned.left_out["schedule"]
    assert json.loads(heavy.text)["learning_rate"] == 0.5
    assert heavy.left_out["optimizer"].endswith("the arguments lose momentum")
    assert "schedule" not in heavy.left_out


def test_layers_that_are_all_recomputed_are_gradient_checkpointing(tmp_path: Path) -> None:
    (tmp_path / "lm.py").write_text(JOB)
    job = load_job(str(tmp_path / "lm.py:LM"), {})
    layers = {f"llama.model.layers.{number}": "full" for number in range(2)}
    for modes, said in ((layers, True), (dict([*layers.items()][:1]), False)):
        made = plan("single", job=str(tmp_path / "lm.py:LM"), unit="tokens", global_batch=512, micro_batch=256,
                    micro_batches=[[256, 256]], checkpointing=modes)  # fmt: skip
        exported = export(made, job, plain_nets(job), "transformers", "file", "/plan.toml")
        values = json.loads(exported.text)
        assert values["gradient_checkpointing"] == said
        assert ("checkpointing by module" in exported.left_out) != said
        assert (values["per_device_train_batch_size"], values["gradient_accumulation_steps"]) == (4, 2)
        assert "short last micro-batch" not in exported.left_out
        torchtitan = export(made, job, plain_nets(job), "torchtitan", "file", "/plan.toml")
        assert ("activation-checkpoint:full" in torchtitan.text) == said
        assert "--training.seq_len 64" in torchtitan.text


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["tests/verify/jobs.py:Sound", "--global-batch", "8", "--device", "t4", "--device", "l40s"], "--for with 2"),
    ],
)
def test_wrong_use_is_one_line(run: Run, words: list[str], expected: str) -> None:
    is_one_line(run("plan", *words, "--for", "lightning"), expected)


def test_the_predicted_bytes_leave_out_the_copy_of_memfits_own_checkpoints(run: Run, tmp_path: Path) -> None:
    answer = planned(run, tmp_path, "lightning")
    train = read_plan(tmp_path / "plan.toml").phases["train"]
    state = sum(train["categories"][name] for name in ("parameters", "optimizer"))
    assert state <= train["allocated_bytes"] - answer["predicted_bytes"] < state + 4096


@pytest.mark.parametrize("policy", ["FullAC.Config", "NoneType"])
def test_torchtitan_parses_what_is_written(policy: str, tmp_path: Path) -> None:
    """With torchtitan's own reader; its trainer needs a card."""
    pytest.importorskip("torchtitan", reason="torchtitan is not among the development packages")
    (tmp_path / "lm.py").write_text(JOB)
    layers = {f"llama.model.layers.{number}": "full" for number in range(2)}
    made = plan("single", job=str(tmp_path / "lm.py:LM"), unit="tokens", global_batch=512, micro_batch=256,
                micro_batches=[[256, 256]], checkpointing=layers if policy != "NoneType" else {})  # fmt: skip
    config = parsed_by_torchtitan(made)
    assert (config.training.local_batch_size, config.training.global_batch_size) == (4, 8)
    assert (config.training.seq_len, config.training.mixed_precision_param) == (64, "float32")
    assert config.training.disable_cuda_graphs
    assert type(config.activation_checkpoint).__qualname__ == policy


MESHES = [
    ("fsdp2", {"dp_replicate": 2, "dp_shard": 2}, [[4, 4]] * 4, (4, 16 * 2)),
    ("fsdp2", {"dp_shard": 2, "tp": 2}, [[4, 4]] * 2, (4, 16)),
    ("fsdp2", {"dp_replicate": 2, "tp": 2}, [[4, 4]] * 2, (4, 16)),
    ("fsdp2", {"dp_shard": 2, "dp_shard_in_ep": 2}, [[4, 4]] * 4, (4, 32)),
    ("fsdp2", {"dp_shard_in_ep": 2, "cp": 2}, [[4, 4]] * 2, (4, 16)),
    ("fsdp2", {"pp": 2, "dp_shard_in_ep": 2}, [[4, 4]] * 2, (8, 16)),
    ("fsdp2", {"pp": 2, "dp_shard": 2}, [[4, 4]] * 2, (8, 16)),
    ("fsdp2", {"pp": 2, "dp_replicate": 2}, [[4, 4]] * 2, (8, 16)),
    ("fsdp2", {"pp": 2, "tp": 2}, [[4, 4]], (8, 8)),
    ("fsdp2", {"cp": 4}, [[4, 4]], (4, 8)),
    ("fsdp2", {"dp_shard": 2, "cp": 2}, [[4, 4]] * 2, (4, 16)),
    ("fsdp2", {"dp_replicate": 2, "cp": 2}, [[4, 4]] * 2, (4, 16)),
    ("fsdp2", {"cp": 2, "tp": 2}, [[4, 4]], (4, 8)),
    ("fsdp2", {"pp": 2, "cp": 2}, [[4, 4]], (8, 8)),
]  # fmt: skip


@pytest.mark.parametrize(("engine", "mesh", "sizes", "batches"), MESHES)
def test_torchtitan_gets_every_degree_of_a_mesh(engine: str, mesh: Any, sizes: Any, batches: Any) -> None:
    made = plan(engine, mesh=mesh, micro_batches=sizes, micro_batch=4, global_batch=8 * len(sizes))
    job = load_job(made.job, dict(made.settings))
    exported = export(made, job, plain_nets(job), "torchtitan", "file", "/plan.toml")
    assert "mesh" not in exported.left_out
    assert "--nproc-per-node 4 " in exported.text
    pytest.importorskip("torchtitan", reason="torchtitan is not among the development packages")
    config = parsed_by_torchtitan(made)
    assert (config.training.local_batch_size, config.training.global_batch_size) == batches
    degrees = {name: getattr(config.parallelism, degree) for name, degree in DEGREES.items()}
    inside = mesh.get("dp_shard_in_ep", 1)
    theirs = {name: size for name, size in mesh.items() if name not in ("dp_shard", "dp_shard_in_ep")}
    theirs |= {"ep": inside * mesh.get("cp", 1)} if inside > 1 else {}
    theirs |= {"dp_shard": mesh.get("dp_shard", 1) * inside} if mesh.get("dp_shard", 1) * inside > 1 else {}
    assert {name: size for name, size in degrees.items() if size > 1} == theirs
    if "pp" in mesh:
        assert config.parallelism.pipeline_parallel_microbatch_size == 4
    if "tp" in mesh:
        assert config.parallelism.enable_sequence_parallel is False


CHOICES = [
    ({"dp_shard": 4}, {"cpu_offload": True, "half_gather": True}, ("training.enable_cpu_offload", True)),
    ({"dp_shard": 2, "tp": 2}, {"sequence_parallel": True}, ("parallelism.enable_sequence_parallel", True)),
    *(
        ({"pp": 2, "dp_shard": 2}, {"schedule": name}, ("parallelism.pipeline_parallel_schedule", theirs))
        for name, theirs in (("gpipe", "GPipe"), ("interleaved_1f1b", "Interleaved1F1B"))
    ),
    (
        {"pp": 2, "dp_shard": 2}, {"schedule": "interleaved_zero_bubble"},
        ("parallelism.pipeline_parallel_schedule", "InterleavedZeroBubble"),
    ),
]  # fmt: skip


@pytest.mark.parametrize(("mesh", "choices", "expected"), CHOICES)
def test_torchtitan_gets_the_choices_of_the_engine(mesh: Any, choices: Any, expected: Any) -> None:
    ranks = mesh.get("dp_shard", 1)
    made = plan(
        "fsdp2", mesh=mesh, micro_batches=[[4, 4]] * ranks, micro_batch=4, global_batch=8 * ranks,
        engine_choices=choices, precision="bf16",
    )  # fmt: skip
    job = load_job(made.job, dict(made.settings))
    exported = export(made, job, plain_nets(job), "torchtitan", "file", "/plan.toml")
    assert "engine choices" not in exported.left_out
    assert ("gathers" in exported.left_out) is ("half_gather" not in choices)
    name, value = expected
    assert f"--{name}" + ("" if value is True else f" {value}") + " \\\n" in exported.text
    pytest.importorskip("torchtitan", reason="torchtitan is not among the development packages")
    group, _, key = name.partition(".")
    assert getattr(getattr(parsed_by_torchtitan(made), group), key) == value


def parsed_by_torchtitan(made: Any) -> Any:
    """The configuration that torchtitan reads from what is written for a plan."""
    from memfit.script.titan.config import importable

    job = load_job(made.job, dict(made.settings))
    words = export(made, job, plain_nets(job), "torchtitan", "file", "/plan.toml").text.partition('"$@"')[2]
    with importable():
        from torchtitan.config import ConfigManager

        chosen = ["--module", "llama3", "--config", "llama3_debugmodel"]
        return ConfigManager().parse_args([*chosen, *words.replace("\\", "").split()])
