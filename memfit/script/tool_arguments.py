"""Memory-saving edits of a script in the words of the trainer that it uses: arguments or lines of its configuration."""

from __future__ import annotations

from collections.abc import Mapping

SCRIPT_TOOLS = ("deepspeed", "accelerate", "lightning", "transformers", "torchtitan")
"""Trainers that take edits of a script. The launchers (torchrun, Slurm, SkyPilot) have no argument for any."""

HALF_BATCH = {
    "transformers": "TrainingArguments: half per_device_train_batch_size, twice gradient_accumulation_steps",
    "lightning": "Trainer(accumulate_grad_batches=...): twice it, and half the loader's batch_size",
    "accelerate": "Accelerator(gradient_accumulation_steps=...): twice it, and half the loader's batch_size",
    "deepspeed": 'half "train_micro_batch_size_per_gpu", twice "gradient_accumulation_steps"',
    "torchtitan": "half --training.local_batch_size, with --training.global_batch_size as it is",
}
BF16_AUTOCAST = {
    "transformers": "TrainingArguments(bf16=True)",
    "lightning": 'Trainer(precision="bf16-mixed")',
    "accelerate": 'Accelerator(mixed_precision="bf16")',
    "deepspeed": '"torch_autocast": {"enabled": true, "dtype": "bfloat16"}',
}
CHECKPOINT_BLOCKS = {
    "transformers": (
        'TrainingArguments(gradient_checkpointing=True, gradient_checkpointing_kwargs={"use_reentrant": False})'
    ),
    "torchtitan": "activation-checkpoint:full",
}


def eight_bit_state(optimizer: str) -> Mapping[str, str]:
    """Words for the 8-bit state of an optimizer, by the name of torch's class."""
    names = {"AdamW": "adamw_bnb_8bit", "RMSprop": "rmsprop_bnb_8bit"}
    return {"transformers": f'TrainingArguments(optim="{names[optimizer]}")'} if optimizer in names else {}


def fused_step(optimizer: str) -> Mapping[str, str]:
    """Words for the fused step of an optimizer, by the name of torch's class."""
    return {"transformers": 'TrainingArguments(optim="adamw_torch_fused")'} if optimizer == "AdamW" else {}
