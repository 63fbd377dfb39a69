"""Optimizers of the built-in jobs that torch does not have: parameters go in, a ``torch.optim.Optimizer`` comes out.

Their state has the bytes and types of the originals.
"""
