"""Lint: a training script goes in; mistakes of memory and batches come out, each with its line and what to write.

It reads the syntax tree and runs nothing.
"""
