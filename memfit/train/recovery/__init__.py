"""Recovery: a memory failure in a window goes in, the same window in smaller micro-batches comes out.

What a failed step has changed is restored or finished exactly once, and all ranks agree on what follows.
"""
