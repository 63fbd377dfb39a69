"""The fine-tuning with Lightning: python examples/beside/lightning_module.py."""

from typing import Any

from fine_tuning import ACCUMULATION, CLIP, EPOCHS, MICRO_BATCH, adamw, decoder, mean_loss, paragraphs, tokens, window
from lightning.pytorch import LightningModule, Trainer
from torch import nn
from torch.utils.data import DataLoader

import memfit


class FineTuning(LightningModule):
    """A batch of the loader is a window: the list of its micro-batches."""

    def __init__(self) -> None:
        super().__init__()
        self.model = decoder()
        self.automatic_optimization = False

    def configure_optimizers(self) -> Any:
        return adamw(self.model)

    def on_train_start(self) -> None:
        self.guard = memfit.guard(self.optimizers(), self.model)  # memfit

    def training_step(self, batches: list[Any], index: int) -> None:
        for part in self.guard.window(batches):  # memfit
            with part as batch:  # memfit
                self.guard.backward(mean_loss(self.model, batch), tokens(batch))  # memfit
        optimizer = self.optimizers()
        self.clip_gradients(optimizer, gradient_clip_val=CLIP, gradient_clip_algorithm="norm")
        optimizer.step()
        optimizer.zero_grad()


def train() -> nn.Module:
    """The trained decoder."""
    module = FineTuning()
    loader = DataLoader(paragraphs(), batch_size=MICRO_BATCH * ACCUMULATION, collate_fn=window)
    Trainer(max_epochs=EPOCHS, accelerator="auto", devices=1, logger=False, enable_checkpointing=False).fit(
        module, loader
    )
    return module.model


if __name__ == "__main__":
    train()
