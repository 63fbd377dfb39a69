"""A plan as the arguments of Lightning's Trainer, of Transformers' TrainingArguments and of torchtitan.

Formats: Lightning 2.6 (``Trainer``, under ``trainer:`` of a LightningCLI configuration), Transformers 5
(``TrainingArguments``, as ``HfArgumentParser.parse_json_file`` reads it) and the command line of torchtitan 0.3, which
has no configuration files.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from memfit.engine.capabilities import CAPABILITIES, Capabilities
from memfit.job import Job, Nets
from memfit.mesh import MeshShape
from memfit.plan import Plan
from memfit.printable import one_line
from memfit.script.titan.target import DEGREES, titan_mesh
from memfit.show.export_geometry import ExportGeometry
from memfit.show.exported_choices import titan_choices

_HUGGING_FACE_OPTIMIZERS = {
    ("AdamW", "fused"): "adamw_torch_fused", ("AdamW", ""): "adamw_torch", ("SGD", ""): "sgd",
    ("Adagrad", ""): "adagrad", ("RMSprop", ""): "rmsprop",
}  # fmt: skip
"""``TrainingArguments.optim`` by the class of torch.optim and its kernels."""


@dataclass(frozen=True, kw_only=True)
class TrainerConfig:
    """Arguments of a trainer, what they say of the plan (names of notes), and notes of what they do not."""

    values: Mapping[str, Any]
    says: frozenset[str] = frozenset()
    notes: Mapping[str, str]


@dataclass(frozen=True, kw_only=True)
class PlannedJob:
    """What is exported: a plan, its job with nets (without bytes), and its window in equal micro-batches."""

    plan: Plan
    job: Job
    nets: Nets
    geometry: ExportGeometry
    deepspeed: Mapping[str, Any]
    """The configuration of DeepSpeed, for a plan that it carries."""

    @property
    def does(self) -> Capabilities:
        """What the plan's engine does."""
        return CAPABILITIES.get(self.plan.engine, Capabilities())

    @property
    def optimizers(self) -> Mapping[str, Any]:
        """Of the job."""
        return self.job.optimizers(self.nets)

    @property
    def recomputed(self) -> dict[str, str]:
        """Modules that keep not all of their activations."""
        return {module: mode for module, mode in self.plan.checkpointing.items() if mode != "keep"}

    def recomputes_all_of(self, blocks: set[str]) -> bool:
        """Whether exactly these modules are recomputed in full."""
        return bool(blocks) and self.recomputed == dict.fromkeys(blocks, "full")


def lightning_config(planned: PlannedJob) -> TrainerConfig:
    """``Trainer(**values)``."""
    plan, geometry, does = planned.plan, planned.geometry, planned.does
    values: dict[str, Any] = {
        "accelerator": "cpu" if plan.device == "cpu" else "gpu",
        "devices": geometry.world,
        "strategy": "auto" if geometry.world == 1 else "ddp",
        "precision": {"fp32": "32-true", "bf16": "bf16-mixed", "fp16": "16-mixed"}[plan.precision],
    }
    notes = {"micro-batch": f"DataLoader(batch_size={geometry.micro_batch})"}
    if does.is_deepspeed:
        values["strategy"] = f"deepspeed_stage_{does.zero_stage}"
    elif does.shards_weights:
        values["strategy"] = "fsdp"
        notes["engine"] = (
            "strategy fsdp is FSDP1; for FSDP2 write ModelParallelStrategy(), and torch.distributed.fsdp.fully_shard "
            "in configure_model"
        )
    elif geometry.world > 1 and planned.job.wrapper == "ddp_find_unused":
        values["strategy"] = "ddp_find_unused_parameters_true"
    names = list(planned.optimizers)
    if len(names) > 1:
        notes["several optimizers"] = (
            f"automatic optimization steps one: {names} need automatic_optimization = False, and the module "
            f"accumulates {geometry.accumulation} micro-batches (memfit.guard does) and calls self.clip_gradients"
        )
        return TrainerConfig(values=values, notes=notes)
    values["accumulate_grad_batches"] = geometry.accumulation
    if planned.job.clip is not None:
        values |= {"gradient_clip_val": planned.job.clip, "gradient_clip_algorithm": "norm"}
    if geometry.accumulation > 1:
        notes["normalisation by units"] = "callbacks=[memfit.lightning.ExactAccumulation(units=...)]"
    return TrainerConfig(values=values, notes=notes)


def transformers_config(planned: PlannedJob) -> TrainerConfig:
    """``TrainingArguments(output_dir=…, **values)``."""
    plan, geometry, does, clip = planned.plan, planned.geometry, planned.does, planned.job.clip
    values: dict[str, Any] = {
        "per_device_train_batch_size": geometry.micro_batch,
        "gradient_accumulation_steps": geometry.accumulation,
        "max_grad_norm": 0.0 if clip is None else clip,
        "bf16": plan.precision == "bf16",
        "fp16": plan.precision == "fp16",
        "gradient_checkpointing": False,
        "use_cpu": plan.device == "cpu",
        "seed": plan.seed,
    }
    notes, says = {}, set()
    notes["normalisation by units"] = (
        "the Trainer divides by the window's labels where the model's forward takes num_items_in_batch, as those of "
        "transformers do; else each micro-batch counts alike"
    )
    if geometry.counts == "micro-batches":
        notes["micro-batch"] = f"one row of the data set must be a whole micro-batch of {plan.micro_batch} {plan.unit}"
    blocks = _layers(planned.nets)
    if planned.recomputes_all_of(blocks):
        values |= {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": False}}
        says.add("checkpointing by module")
    kinds = {type(optimizer).__name__ for optimizer in planned.optimizers.values()}
    kernels = "fused" if plan.implementation == "fused" else ""
    optimizer = _HUGGING_FACE_OPTIMIZERS.get((next(iter(kinds)), kernels)) if len(planned.optimizers) == 1 else None
    if optimizer is not None:
        values["optim"] = optimizer
        arguments, lost = _optimizer_arguments(next(iter(planned.optimizers.values())))
        values |= arguments
        if lost:
            notes["optimizer"] = f"Trainer(optimizers=(optimizer, None)) with the job's own: the arguments lose {lost}"
        if kernels:
            says.add("optimizer's kernels")
    else:
        notes["optimizer"] = f"Trainer(optimizers=(optimizer, None)) with the job's own {', '.join(sorted(kinds))}"
    values["lr_scheduler_type"] = "constant"
    if schedules := _schedules(planned.job):
        notes["schedule"] = f"Trainer(optimizers=(optimizer, scheduler)) with {schedules}; the arguments keep the rate"
    if does.is_deepspeed:
        values["deepspeed"] = dict(planned.deepspeed)
    elif does.shards_weights:
        values |= {"fsdp": True, "fsdp_config": {"version": 2, "reshard_after_forward": True}}
        if plan.engine_choices.get("cpu_offload"):
            values["fsdp_config"]["cpu_offload"] = True
    if planned.job.wrapper == "ddp_find_unused":
        values["ddp_find_unused_parameters"] = True
    return TrainerConfig(values=values, says=frozenset(says), notes=notes)


def _optimizer_arguments(optimizer: Any) -> tuple[dict[str, Any], str]:
    """Arguments with the optimizer's rate and what belongs to it, and in words what they cannot say of it."""
    first, *others = optimizer.param_groups
    arguments: dict[str, Any] = {"learning_rate": float(first["lr"]), "weight_decay": float(first["weight_decay"])}
    lost = [name for name in ("momentum", "nesterov", "amsgrad", "maximize", "centered", "lr_decay") if first.get(name)]
    if "betas" in first:
        (arguments["adam_beta1"], arguments["adam_beta2"]), arguments["adam_epsilon"] = first["betas"], first["eps"]
    if others:
        lost.append("its groups of parameters")
    if first["weight_decay"]:
        lost.append("the decay of biases and norms, which the Trainer does not decay")
    return arguments, ", ".join(lost)


def _schedules(job: Job) -> str:
    """The job's own method, where it has schedules."""
    return "" if type(job).schedules is Job.schedules else f"{type(job).__name__}.schedules()"


def torchtitan_config(planned: PlannedJob) -> TrainerConfig:
    """Options of ``torchtitan.train``; one that is True is a flag, and ``activation-checkpoint`` is a subcommand, which
    stands last."""
    plan, geometry, does, job = planned.plan, planned.geometry, planned.does, planned.job
    world = geometry.world
    mesh = plan.mesh_shape or MeshShape(**{"dp_shard" if does.shards_optimizer else "dp_replicate": world})
    values: dict[str, Any] = {
        "training.local_batch_size": geometry.micro_batch,
        "training.global_batch_size": geometry.global_batch,
        "training.max_norm": "inf" if job.clip is None else job.clip,
        "training.mixed_precision_param": {"bf16": "bfloat16"}.get(plan.precision, "float32"),
        "training.disable_cuda_graphs": True,
    }
    values |= titan_choices(plan, mesh)
    theirs = titan_mesh(mesh)
    sizes = {"dp_replicate": theirs.dp_replicate, "dp_shard": theirs.dp_shard, **theirs.sizes()}
    values |= {f"parallelism.{DEGREES[name]}": size for name, size in sizes.items()}
    notes, says = {}, {"checkpointing by module", "normalisation by units", "mesh"}
    if mesh.pp > 1:
        values["training.local_batch_size"] = geometry.micro_batch * geometry.accumulation
        values["parallelism.pipeline_parallel_microbatch_size"] = geometry.micro_batch
        notes["stages"] = "torchtitan divides the layers by its own rule; the plan's stages are those of memfit"
    if (
        does.shards_weights
        and mesh.shards > 1
        and plan.precision == "bf16"
        and not plan.engine_choices.get("half_gather")
    ):
        notes["gathers"] = (
            "torchtitan gathers parameters in bfloat16, and the plan in float32: memfit plan --engine-choice "
            "half_gather=true plans as torchtitan does"
        )
    if mesh.dp_shard_in_ep > 1:
        notes["experts"] = "torchtitan divides the experts of its own models; the plan's job is divided by memfit"
    if mesh.tp > 1:
        notes["cut of layers"] = "torchtitan cuts its own models' layers; the plan's job is cut by memfit"
    if job.longest is not None and geometry.counts == "samples":
        values["training.seq_len"] = job.longest
    else:
        notes["rows"] = "torchtitan trains on rows of training.seq_len tokens; the plan's samples are of another kind"
    if plan.precision == "fp16":
        notes["precision"] = "torchtitan has no fp16; this is fp32"
    if does.is_deepspeed:
        notes["engine"] = f"{plan.engine} became FSDP2, which holds other buffers: memfit predict --engine fsdp2"
    kinds = sorted({type(optimizer).__name__ for optimizer in planned.optimizers.values()})
    notes["model and optimizer"] = f"--module and --config of torchtitan choose them; the plan has {', '.join(kinds)}"
    policy = "none"
    if planned.recomputes_all_of(_layers(planned.nets)):
        policy = "full"
    elif planned.recomputed:
        says.remove("checkpointing by module")
    return TrainerConfig(values={**values, "activation-checkpoint": policy}, says=frozenset(says), notes=notes)


TRAINERS: Mapping[str, Callable[[PlannedJob], TrainerConfig]] = {
    "lightning": lightning_config, "transformers": transformers_config, "torchtitan": torchtitan_config,
}  # fmt: skip


def torchtitan_script(config: TrainerConfig, world: int, comments: str) -> str:
    """A script that starts torchtitan: ``sh torchtitan.sh --module llama3 --config llama3_8b``."""
    values = dict(config.values)
    policy = values.pop("activation-checkpoint")
    options = "".join(f"    --{_flag(name, value)} \\\n" for name, value in values.items())
    return f"""#!/bin/sh
{comments}exec torchrun --standalone --nproc-per-node {world} -m torchtitan.train "$@" \\
{options}    activation-checkpoint:{one_line(policy)}
"""


def _flag(name: str, value: Any) -> str:
    """An option of torchtitan's command line, which tyro reads: what is false begins with ``no-``."""
    if not isinstance(value, bool):
        return f"{name} {value}"
    group, _, key = name.rpartition(".")
    return name if value else f"{group}.no-{key.replace('_', '-')}"


def _layers(nets: Nets) -> set[str]:
    """Modules that ``gradient_checkpointing`` recomputes: layers of transformers, by their class."""
    return {
        f"{name}.{path}"
        for name, net in nets.items()
        for path, module in net.named_modules()
        if any(kind.__name__ == "GradientCheckpointingLayer" for kind in type(module).__mro__)
    }
