"""Finds mistakes of memory and batches in a training script by its syntax tree, without running it."""
