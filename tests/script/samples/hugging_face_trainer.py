"""transformers' Trainer on a GPT-2 that is made from its configuration."""

import sys

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments


class Words(torch.utils.data.Dataset):
    def __len__(self):
        return 8

    def __getitem__(self, i):
        ids = torch.full((64,), i)
        return {"input_ids": ids, "labels": ids}


model = GPT2LMHeadModel(GPT2Config(n_layer=2, n_embd=128, n_head=2, vocab_size=1000))
arguments = TrainingArguments(
    "out", per_device_train_batch_size=2, num_train_epochs=1, save_strategy="no", report_to="none",
    logging_steps=1, disable_tqdm=True, use_cpu="cpu" in sys.argv, seed=0,
)  # fmt: skip
trainer = Trainer(model, arguments, train_dataset=Words())
trainer.train()
