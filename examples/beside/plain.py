"""The fine-tuning as a plain loop: python examples/beside/plain.py."""

from fine_tuning import ACCUMULATION, CLIP, EPOCHS, MICRO_BATCH, adamw, decoder, mean_loss, paragraphs, tokens, window
from torch import nn
from torch.utils.data import DataLoader

import memfit


def train() -> nn.Module:
    """The trained decoder."""
    model = decoder()
    optimizer = adamw(model)
    loader = DataLoader(paragraphs(), batch_size=MICRO_BATCH * ACCUMULATION, collate_fn=window)
    guard = memfit.guard(optimizer, model)  # memfit
    for _ in range(EPOCHS):
        for batches in loader:
            for part in guard.window(batches):  # memfit
                with part as batch:  # memfit
                    guard.backward(mean_loss(model, batch), tokens(batch))  # memfit
            nn.utils.clip_grad_norm_(model.parameters(), CLIP)
            optimizer.step()
            optimizer.zero_grad()
    return model


if __name__ == "__main__":
    train()
