"""Explains what is left after a memory failure: a message, log, memory summary, snapshot, nvidia-smi or metrics."""
