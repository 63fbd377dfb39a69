"""A job set up for training: a job, an engine and a plan's choices go in, nets that run windows come out.

Checkpointing, offload, optimizer implementations and phase policies are applied here, in traces and real runs alike.
"""
