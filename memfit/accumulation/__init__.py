"""Gradient accumulation: the batches of a user's own loop go in, exact windows come out.

A window that runs out of memory is repeated in smaller parts.
"""
