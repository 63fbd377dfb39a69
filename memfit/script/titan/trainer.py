"""What the traced process runs: torchtitan's own trainer, on rows of tokens that are made up.

python -m memfit.script.titan.trainer '{"module": "llama3", "config": "llama3_debugmodel", "changes": {}}'
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from memfit.script.titan.balanced_experts import balance_experts
from memfit.script.titan.config import importable, load_config
from memfit.script.titan.flash_kernels import stand_in_flash_kernels
from memfit.script.titan.image_rows import reads_image_rows, stand_in_image_rows
from memfit.script.titan.images import reads_images, stand_in_images
from memfit.script.titan.other_stages import other_stages
from memfit.script.titan.target import target_from_json


def main() -> None:
    """Trains until the trace has seen enough."""
    with importable():
        config = load_config(target_from_json(sys.argv[1]))
        stand_in(config)
        balance_experts()
        stand_in_flash_kernels()
        with other_stages(config) as follow:
            trainer = config.build()
            follow(trainer)
            trainer.train()
            trainer.close()


def stand_in(config: Any) -> None:
    """Changes what a trace cannot have: data and its tokenizer, files, profiles and timeouts of a real group."""
    from torchtitan.components.dataloader import BaseDataLoader
    from torchtitan.components.tokenizer import BaseTokenizer
    from torchtitan.distributed import utils

    class Rows(BaseDataLoader):
        """Rows of random tokens, each of one document."""

        @dataclass(kw_only=True, slots=True)
        class Config(BaseDataLoader.Config):
            vocabulary: int = 2

        def __init__(self, config: Config, *, seq_len: int, local_batch_size: int, **_: Any) -> None:
            self._size, self._vocabulary = (local_batch_size, seq_len + 1), config.vocabulary

        def __iter__(self) -> Iterator[tuple[dict[str, torch.Tensor], torch.Tensor]]:
            rows, length = self._size
            positions = torch.arange(length - 1).repeat(rows, 1)
            while True:
                tokens = torch.randint(self._vocabulary, self._size)
                yield {"input": tokens[:, :-1].clone(), "positions": positions.clone()}, tokens[:, 1:].clone()

        def state_dict(self) -> dict[str, Any]:
            return {}

        def load_state_dict(self, state_dict: dict[str, Any]) -> None: ...

    class Tokenizer(BaseTokenizer):
        """Stands where the trainer holds its tokenizer; no text is read."""

        @dataclass(kw_only=True, slots=True)
        class Config(BaseTokenizer.Config):
            max_t5_encoding_len: int = 0
            """Of flux alone."""

        def __init__(self, config: Config, **_: Any) -> None:
            super().__init__()
            self.eos_id = 0

        def encode(self, *args: Any, **kwargs: Any) -> list[int]:
            return []

        def decode(self, *args: Any, **kwargs: Any) -> str:
            return ""

        def get_vocab_size(self) -> int:
            return 0

    if reads_images(config):
        stand_in_images(config, Tokenizer)
    elif reads_image_rows(config):
        stand_in_image_rows(config, Tokenizer)
    else:
        config.dataloader = Rows.Config(vocabulary=config.model_spec.model.vocab_size)
        config.tokenizer = Tokenizer.Config()
    config.profiler.enable_profiling = False
    config.metrics.enable_tensorboard = config.metrics.enable_wandb = False
    config.checkpoint.enable = False
    config.training.disable_cuda_graphs = True
    if config.validator.enable:
        config.validator.dataloader, config.validator.steps = config.dataloader, 2
    utils.set_pg_timeouts = lambda *args, **kwargs: None


if __name__ == "__main__":
    main()
