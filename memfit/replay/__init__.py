"""Replay: a trace and an allocator's settings go in, a ``Footprint`` with peaks by phase comes out.

The caching allocator is replayed block by block; windows that follow each other share one allocator.
"""

from memfit.replay.replay import footprint

__all__ = ["footprint"]
