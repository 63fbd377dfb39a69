"""The fine-tuning with Accelerate: accelerate launch examples/beside/accelerate_loop.py."""

from accelerate import Accelerator
from fine_tuning import ACCUMULATION, CLIP, EPOCHS, MICRO_BATCH, adamw, collate, decoder, mean_loss, paragraphs, tokens
from torch import nn
from torch.utils.data import DataLoader

import memfit


def train() -> nn.Module:
    """The trained decoder."""
    accelerator = Accelerator()
    model = decoder()
    optimizer = adamw(model)
    loader = DataLoader(paragraphs(), batch_size=MICRO_BATCH, collate_fn=collate)
    model, optimizer, loader, guard = memfit.accelerate.prepare(accelerator, model, optimizer, loader)  # memfit
    for _ in range(EPOCHS):
        for batches in memfit.accelerate.windows(loader, ACCUMULATION):  # memfit
            for part in guard.window(batches):  # memfit
                with part as batch:  # memfit
                    guard.backward(mean_loss(model, batch), tokens(batch))  # memfit
            accelerator.clip_grad_norm_(model.parameters(), CLIP)
            optimizer.step()
            optimizer.zero_grad()
    return accelerator.unwrap_model(model)


if __name__ == "__main__":
    train()
