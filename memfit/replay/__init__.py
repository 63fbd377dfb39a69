"""A trace replayed through an allocator becomes a Footprint."""

from memfit.replay.replay import footprint

__all__ = ["footprint"]
