"""A plan in the forms that other tools read, and what those forms cannot say.

Formats: DeepSpeed 0.19 (``DeepSpeedConfig``), Accelerate 1.15 (``accelerate launch --config_file``), torch's torchrun.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from memfit.engine.capabilities import CAPABILITIES, Capabilities
from memfit.job import Job, Nets, is_trained
from memfit.plan import PhasePolicy, Plan
from memfit.planner.checkpoint_writing import copy_bytes
from memfit.printable import one_line
from memfit.show.cluster_export import skypilot_task, slurm_script
from memfit.show.export_geometry import ExportGeometry, equal
from memfit.show.exported_choices import left_out_choices, offload_device, steps_on_host, zero_choices
from memfit.show.trainer_config import TRAINERS, PlannedJob, TrainerConfig, torchtitan_script
from memfit.wording import counted, precision_words

FILES = {
    "deepspeed": "deepspeed.json", "accelerate": "accelerate.yaml", "torchrun": "torchrun.sh",
    "lightning": "lightning.yaml", "transformers": "transformers.json", "torchtitan": "torchtitan.sh",
    "slurm": "slurm.sh", "skypilot": "skypilot.yaml",
}  # fmt: skip
"""The names that the files have where no other is asked for."""
CLUSTERS = {"slurm": (slurm_script, "sbatch"), "skypilot": (skypilot_task, "sky launch")}
"""Schedulers that start memfit run itself, so that nothing is left out; who writes their files, what starts them."""


def _does(engine: str) -> Capabilities:
    """What an engine does; a name that this memfit does not know is exported as replicas are."""
    return CAPABILITIES.get(engine, Capabilities())


def _stage(engine: str) -> int:
    """The stage of ZeRO that holds what the engine holds; 0 where every rank holds everything."""
    does = _does(engine)
    return does.zero_stage or (3 if does.shards_weights else 0)


@dataclass(frozen=True, kw_only=True)
class Exported:
    """A file's text, how to start the tool on it, and by name what the file does not say."""

    text: str
    command: str
    geometry: ExportGeometry
    left_out: Mapping[str, str]
    predicted_bytes: int | None = None
    """Peak bytes of tensors in training, without what memfit's own run holds beside it; None: the plan has none."""


def export(plan: Plan, job: Job, nets: Nets, to: str, file: str, plan_file: str, nodes: int = 1) -> Exported:
    """The plan for one of ``FILES``.

    Args:
        nets: the job's, without their bytes.
        file: where the text will be.
        plan_file: where memfit's own plan is.
        nodes: machines that share the plan's devices, for one of ``CLUSTERS``.
    """
    if to in CLUSTERS:
        write, starts = CLUSTERS[to]
        text, command = write(plan, nodes, plan_file), f"{starts} {shlex.quote(file)}"
        return Exported(text=text, command=command, geometry=equal(plan, job), left_out={})
    exported = _exported(plan, job, nets, to, file, plan_file)
    train = plan.phases.get("train")
    return exported if train is None else replace(exported, predicted_bytes=train["allocated_bytes"] - copy_bytes(plan))


def _exported(plan: Plan, job: Job, nets: Nets, to: str, file: str, plan_file: str) -> Exported:
    geometry = equal(plan, job)
    left_out = _left_out(plan, job, nets, to, geometry)
    world = geometry.world
    if to in TRAINERS:
        deepspeed = deepspeed_config(plan, job, geometry)
        planned = PlannedJob(plan=plan, job=job, nets=nets, geometry=geometry, deepspeed=deepspeed)
        return _for_trainer(planned, to, file, left_out)
    cpu = "DS_ACCELERATOR=cpu " if plan.device == "cpu" else ""
    if to == "deepspeed":
        text = json.dumps(deepspeed_config(plan, job, geometry), indent=2) + "\n"
        count = "--num_accelerators" if plan.device == "cpu" else "--num_gpus"
        command = f"{cpu}deepspeed {count} {world} train.py --deepspeed --deepspeed_config {shlex.quote(file)}"
    elif to == "accelerate":
        text = _comments(plan, left_out) + _yaml(accelerate_config(plan, job, nets, geometry))
        own = "ACCELERATE_USE_CPU=true " if plan.device == "cpu" else ""
        command = f"{own}accelerate launch --config_file {shlex.quote(file)} train.py"
    else:
        text = _script(plan, geometry, left_out, plan_file)
        command = f"sh {shlex.quote(file)} train.py"
    return Exported(text=text, command=command, geometry=geometry, left_out=left_out)


def _for_trainer(planned: PlannedJob, to: str, file: str, left_out: dict[str, str]) -> Exported:
    """The plan for a trainer; notes of the plan that its arguments say are left out of what they do not."""
    config: TrainerConfig = TRAINERS[to](planned)
    remaining = {name: text for name, text in left_out.items() if name not in config.says} | dict(config.notes)
    comments, world, path = _comments(planned.plan, remaining), planned.plan.ranks, shlex.quote(file)
    if to == "torchtitan":
        text = torchtitan_script(config, world, comments)
        command = f"sh {path} --module MODULE --config CONFIG"
    elif to == "lightning":
        text, command = comments + _yaml({"trainer": config.values}), f"python train.py fit --config {path}"
    else:
        text = json.dumps(config.values, indent=2) + "\n"
        launcher = "python" if world == 1 else f"torchrun --standalone --nproc-per-node {world}"
        command = f"{launcher} train.py {path}"
    return Exported(text=text, command=command, geometry=planned.geometry, left_out=remaining)


def deepspeed_config(plan: Plan, job: Job, geometry: ExportGeometry) -> dict[str, Any]:
    """What ``deepspeed.initialize(config=…)`` takes."""
    config: dict[str, Any] = {
        "train_batch_size": geometry.global_batch,
        "train_micro_batch_size_per_gpu": geometry.micro_batch,
        "gradient_accumulation_steps": geometry.accumulation,
        "zero_optimization": {"stage": _stage(plan.engine), **zero_choices(plan)},
        "zero_allow_untested_optimizer": True,
    }
    if steps_on_host(plan):
        config["zero_force_ds_cpu_optimizer"] = False
    if job.clip is not None:
        config["gradient_clipping"] = job.clip
    if plan.precision != "fp32":
        dtype = {"bf16": "bfloat16", "fp16": "float16"}[plan.precision]
        config["torch_autocast"] = {"enabled": True, "dtype": dtype}
    return config


def accelerate_config(plan: Plan, job: Job, nets: Nets, geometry: ExportGeometry) -> dict[str, Any]:
    """What ``accelerate launch --config_file`` takes."""
    does = _does(plan.engine)
    config: dict[str, Any] = {
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": "NO" if geometry.world == 1 else "MULTI_GPU",
        "machine_rank": 0,
        "num_machines": 1,
        "num_processes": geometry.world,
        "mixed_precision": {"fp32": "no"}.get(plan.precision, plan.precision),
        "main_training_function": "main",
        "use_cpu": plan.device == "cpu" and geometry.world == 1,
    }
    if not does.is_deepspeed and does.shards_weights:
        config["distributed_type"] = "FSDP"
        config["fsdp_config"] = {
            "fsdp_version": 2,
            "fsdp_reshard_after_forward": True,
            "fsdp_offload_params": bool(plan.engine_choices.get("cpu_offload")),
            "fsdp_cpu_ram_efficient_loading": False,
            "fsdp_state_dict_type": "SHARDED_STATE_DICT",
            "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
            "fsdp_transformer_layer_cls_to_wrap": ",".join(_gathered(nets)),
        }
    elif does.is_deepspeed:
        config["distributed_type"] = "DEEPSPEED"
        config["deepspeed_config"] = {
            "zero_stage": does.zero_stage,
            "gradient_accumulation_steps": geometry.accumulation,
            "zero3_init_flag": False,
            "offload_optimizer_device": offload_device(plan, "offload_optimizer"),
            "offload_param_device": offload_device(plan, "offload_param"),
        }
        if job.clip is not None:
            config["deepspeed_config"]["gradient_clipping"] = job.clip
    return config


def _gathered(nets: Nets) -> list[str]:
    """Classes of the modules that memfit's FSDP2 gathers one by one."""
    from memfit.engine.sharded_units import units

    trained = [net for net in nets.values() if is_trained(net)]
    return sorted({type(net.get_submodule(path)).__name__ for net in trained for path in units(net) if path})


def _script(plan: Plan, geometry: ExportGeometry, left_out: Mapping[str, str], plan_file: str) -> str:
    sizes = shlex.quote(json.dumps(plan.micro_batches))
    return f"""#!/bin/sh
{_comments(plan, left_out)}# With arguments (sh torchrun.sh train.py), starts them on every rank.
# Without, memfit itself, which has it all.
export MEMFIT_GLOBAL_BATCH={plan.global_batch} MEMFIT_MICRO_BATCHES={sizes}
[ $# -gt 0 ] || set -- -m memfit run {shlex.quote(plan_file)} --out run
exec torchrun --standalone --nproc-per-node {geometry.world} "$@"
"""


def _comments(plan: Plan, left_out: Mapping[str, str]) -> str:
    precision = precision_words(plan.precision, plan.net_kind)
    lines = [f"{plan.job}: {plan.arithmetic}, {plan.engine}, {precision}", "Not said here:"]
    lines += [f"- {name}: {text}" for name, text in left_out.items()]
    return "".join(f"# {one_line(line)}\n" for line in lines)


def _left_out(plan: Plan, job: Job, nets: Nets, to: str, geometry: ExportGeometry) -> dict[str, str]:
    """By name, what a tool's file cannot express, and what to write instead."""
    notes = _batch_notes(plan, to, geometry) | _tool_notes(plan, job, nets, to, geometry)
    return notes | _plan_notes(plan, job) | left_out_choices(plan, to)


def _batch_notes(plan: Plan, to: str, geometry: ExportGeometry) -> dict[str, str]:
    """What a tool does not know of the window: its units, its lengths and its short last micro-batch."""
    world, count = geometry.world, geometry.accumulation
    micro, total = geometry.micro_batch * geometry.sample_units, geometry.global_batch * geometry.sample_units
    divides = to != "torchrun"
    factor = f" * {world}" + (f" * {count}" if divides else "")
    who = f"the tool divides by {count} and averages over {world}" if divides else f"DDP averages over {world}"
    notes = {
        "normalisation by units": "N = valid units of the window's micro-batches on all ranks, summed before the "
        f"first backward; each backward on sum_of_losses / N{factor} ({who})"
    }
    if divides and geometry.counts == "micro-batches":
        notes["variable length"] = (
            f"the numbers count micro-batches; each holds at most {plan.micro_batch} {plan.unit}: give the loader "
            f"memfit.batch.LengthBatchSampler as its batch_sampler"
        )
    elif divides and (micro, total) != (plan.micro_batch, plan.global_batch):
        by_rank = [str(list(rank)) for rank in dict.fromkeys(map(tuple, plan.micro_batches))]
        notes["short last micro-batch"] = (
            f"the plan's micro-batches are {' and '.join(by_rank)}; "
            f"the tool's are equal, so {count} x {micro} on each rank"
        )
        if total != plan.global_batch:
            notes["short last micro-batch"] += (
                f", {total} where the plan has {plan.global_batch}: give the loop the plan's own "
                "sizes, with the N above"
            )
    return notes


def _tool_notes(plan: Plan, job: Job, nets: Nets, to: str, geometry: ExportGeometry) -> dict[str, str]:
    """What stands in the script instead, where this tool or DeepSpeed runs it."""
    does, count = _does(plan.engine), geometry.accumulation
    notes = {}
    if to == "accelerate" and not does.is_deepspeed:
        notes["accumulation"] = f"Accelerator(gradient_accumulation_steps={count}), or in the environment: " + (
            f"ACCELERATE_GRADIENT_ACCUMULATION_STEPS={count}"
        )
    if to == "accelerate":
        notes["micro-batch"] = f"DataLoader(batch_size={geometry.micro_batch})"
        if job.clip is not None and not does.is_deepspeed:
            notes["clipping"] = f"accelerator.clip_grad_norm_(parameters, {job.clip})"
    if to == "deepspeed" and does.shards_weights and not does.is_deepspeed:
        notes["engine"] = (
            f"{plan.engine} became ZeRO's stage 3, which holds other buffers: memfit predict --engine zero3"
        )
    optimizers = list(job.optimizers(nets))
    if len(optimizers) > 1 and (to == "deepspeed" or does.is_deepspeed):
        notes["several optimizers"] = f"a DeepSpeed engine steps one: deepspeed.initialize for each of {optimizers}"
    return notes


def _plan_notes(plan: Plan, job: Job) -> dict[str, str]:
    """The plan's memory-saving options and policies, which no tool's file has."""
    notes = {}
    recomputed = {module: mode for module, mode in plan.checkpointing.items() if mode != "keep"}
    if recomputed:
        notes["checkpointing by module"] = f"torch.utils.checkpoint on {json.dumps(recomputed)}"
    if plan.implementation in ("fused", "foreach", "loop"):
        notes["optimizer's kernels"] = f"the optimizers' steps are {plan.implementation}: torch.optim's own argument"
    if job.validates:
        notes["validation"] = f"{_policy(plan.validation)}, every {counted(_every(plan, job), 'window')}"
    if plan.saving != PhasePolicy():
        notes["saving"] = _policy(plan.saving)
    if plan.optimizer_state == "host":
        notes["optimizer state"] = "it waits on the host between steps, as DeepSpeed's offload_optimizer does"
    if plan.average == "host":
        notes["average"] = "the average of the weights waits on the host between its updates"
    if plan.idle_nets != "keep":
        notes["idle nets"] = "nets that a phase does not use wait on the host"
    if plan.mesh:
        shape, names = tuple(plan.mesh.values()), tuple(plan.mesh)
        notes["mesh"] = (
            "the file knows one kind of rank; the plan's is "
            f"init_device_mesh(device, {shape}, mesh_dim_names={names}), which fully_shard(mesh=...) takes"
        )
    if plan.learning_rate != 1.0:
        notes["learning rate"] = (
            f"times {plan.learning_rate:g}, after {counted(plan.warmup_windows, 'window')} of warm-up"
        )
    return notes


def _every(plan: Plan, job: Job) -> int:
    return job.validate_every if plan.validate_every is None else plan.validate_every


def _policy(policy: PhasePolicy) -> str:
    """What is other than usual in a phase's policy, in words."""
    if policy.where == "skip":
        return "left out"
    values = {key: value for key, value in asdict(policy).items() if value not in (None, {}, "here")}
    return ", ".join(f"{key} {value}" for key, value in values.items())


def _yaml(values: Mapping[str, Any], indent: str = "") -> str:
    """Scalars and mappings; a scalar of JSON is one of YAML."""
    return "".join(
        f"{indent}{key}:\n{_yaml(value, indent + '  ')}" if isinstance(value, Mapping)
        else f"{indent}{key}: {json.dumps(value)}\n"
        for key, value in values.items()
    )  # fmt: skip
