"""Sets a job up for training: takes a job, an engine and a plan's choices; gives nets that run windows.

Checkpointing, offload, optimizer implementations and phase policies are applied here, for traces and real runs alike.
"""
