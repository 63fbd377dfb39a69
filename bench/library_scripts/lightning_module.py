"""A Lightning module under its Trainer, for bench/versions.py."""

import lightning
import torch
from torch.utils.data import DataLoader, TensorDataset


class Autoencoder(lightning.LightningModule):
    """Two linear layers that learn to give back what they are given."""

    def __init__(self):
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Linear(256, 1024), torch.nn.GELU(), torch.nn.Linear(1024, 256))

    def training_step(self, batch, index):
        """The mean squared error of a batch, (samples, 256)."""
        return (self.net(batch[0]) - batch[0]).square().mean()

    def configure_optimizers(self):
        """AdamW with its defaults."""
        return torch.optim.AdamW(self.parameters())


if __name__ == "__main__":
    trainer = lightning.Trainer(max_epochs=1, logger=False, enable_checkpointing=False, enable_progress_bar=False)
    trainer.fit(Autoencoder(), DataLoader(TensorDataset(torch.randn(64, 256)), batch_size=16))
