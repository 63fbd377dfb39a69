"""Optimizers of the built-in jobs that torch does not have."""
