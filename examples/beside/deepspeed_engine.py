"""The fine-tuning with DeepSpeed: deepspeed examples/beside/deepspeed_engine.py."""

import deepspeed
from fine_tuning import ACCUMULATION, CLIP, EPOCHS, MICRO_BATCH, adamw, decoder, mean_loss, paragraphs, tokens, window
from torch import nn
from torch.utils.data import DataLoader

import memfit

CONFIG = {
    "train_micro_batch_size_per_gpu": MICRO_BATCH,
    "gradient_accumulation_steps": 1,
    "gradient_clipping": CLIP,
    "zero_optimization": {"stage": 2, "reduce_bucket_size": 1_000_000},
    "zero_allow_untested_optimizer": True,
}


def train() -> nn.Module:
    """The trained decoder."""
    model = decoder()
    engine, *_ = deepspeed.initialize(model=model, optimizer=adamw(model), config=CONFIG)
    loader = DataLoader(paragraphs(), batch_size=MICRO_BATCH * ACCUMULATION, collate_fn=window)
    guard = memfit.deepspeed.guard(engine)  # memfit
    for _ in range(EPOCHS):
        for batches in loader:
            for part in guard.window(batches):  # memfit
                with part as batch:  # memfit
                    batch = {name: tensor.to(engine.device) for name, tensor in batch.items()}
                    guard.backward(mean_loss(engine, batch), tokens(batch))  # memfit
            engine.step()
    return engine.module


if __name__ == "__main__":
    train()
