"""memfit fits a PyTorch training run into the memory there is."""
