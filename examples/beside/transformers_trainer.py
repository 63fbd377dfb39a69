"""The fine-tuning with Transformers' Trainer: python examples/beside/transformers_trainer.py."""

from tempfile import TemporaryDirectory

from fine_tuning import ACCUMULATION, CLIP, EPOCHS, MICRO_BATCH, RATE, collate, decoder, paragraphs
from torch import nn
from transformers import Trainer, TrainingArguments

import memfit


class SplittingTrainer(memfit.transformers.SplitStep, Trainer):  # memfit
    """Splits a step that does not fit."""


def train() -> nn.Module:
    """The trained decoder."""
    with TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder, per_device_train_batch_size=MICRO_BATCH, gradient_accumulation_steps=ACCUMULATION,
            num_train_epochs=EPOCHS, learning_rate=RATE, lr_scheduler_type="constant", weight_decay=0.0,
            max_grad_norm=CLIP, optim="adamw_torch", train_sampling_strategy="sequential", save_strategy="no",
            report_to="none",
        )  # fmt: skip
        trainer = SplittingTrainer(
            model=decoder(), args=arguments, train_dataset=paragraphs(), data_collator=collate,
            callbacks=[memfit.transformers.WatchCallback(out=None)],  # memfit
        )  # fmt: skip
        trainer.train()
    return trainer.model


if __name__ == "__main__":
    train()
