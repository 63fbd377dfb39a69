"""The search: a job and a PlanRequest go in, the fastest plan that fits or the smallest need comes out.

Candidates are micro-batches with a checkpointing choice for every block; the best one is traced in full and replayed.
"""
